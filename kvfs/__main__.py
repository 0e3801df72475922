"""`python -m kvfs` is the `kvfs` command."""

import sys

from kvfs.cli import main

sys.exit(main())
