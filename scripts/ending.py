"""How a script ends when it is told to: with nothing left behind."""

import signal
import sys


def clean_up_on_sigterm() -> None:
    """Let SIGTERM unwind the stack, so that what was started ends and what was made is removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
