"""The process behind a mount in the background; `kvfs mount` starts it with its orders."""

import sys

from mount.run import background

sys.exit(background())
