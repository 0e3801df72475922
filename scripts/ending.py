"""How a script ends when it is told to: with nothing left behind."""

import signal
import sys


def clean_up_on_sigterm() -> None:
    """Let SIGTERM unwind the stack, so that what was started ends and what was made is removed.
    Further ones do not disturb that."""
    signal.signal(signal.SIGTERM, _unwind)


def ignore_sigterm() -> None:
    """From now on: it ends already."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # SIG_IGN would be inherited by what is started


def _unwind(*_: object) -> None:
    ignore_sigterm()
    sys.exit(143)
