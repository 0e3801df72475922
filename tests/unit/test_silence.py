"""When a silent metadata server is asked again."""

import pytest

from kvfs.config import CLUSTER_BACKOFF_S, CLUSTER_BACKOFF_S_MAX
from kvfs.errors import Unavailable
from kvfs.meta.silence import Silence

SILENT = Unavailable("it was silent")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def is_asked(silence: Silence) -> bool:
    try:
        silence.check()
    except Unavailable:
        return False
    return True


def test_each_failure_doubles_the_pause_up_to_its_bound() -> None:
    clock = Clock()
    silence = Silence(clock)
    assert is_asked(silence)
    pause_s = CLUSTER_BACKOFF_S
    for _ in range(10):
        silence.note_failure(SILENT)
        clock.now_s += pause_s - 0.01
        assert not is_asked(silence)
        clock.now_s += 0.02
        assert is_asked(silence)
        pause_s = min(2 * pause_s, CLUSTER_BACKOFF_S_MAX)
    assert pause_s == CLUSTER_BACKOFF_S_MAX


@pytest.mark.parametrize("failures", [1, 5])
def test_who_hears_it_ends_the_silence_for_all(failures: int) -> None:
    clock = Clock()
    silence = Silence(clock)
    for _ in range(failures):
        silence.note_failure(SILENT)
    with pytest.raises(Unavailable, match="it was silent"):
        silence.check()
    silence.note_answer()
    assert is_asked(silence)
    silence.note_failure(SILENT)
    clock.now_s += CLUSTER_BACKOFF_S + 0.01
    assert is_asked(silence)
