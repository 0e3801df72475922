"""What keeps a node from its metadata server is said once, however often it comes and goes."""

import logging

import pytest

from kvfs.cluster.trouble import Trouble
from kvfs.config import CLUSTER_SAID_S
from kvfs.errors import Unavailable


@pytest.fixture
def allow_warnings() -> list[str]:
    return ["cut off from the cluster", "answers again"]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING)
    return caplog


def test_all_that_fails_must_be_over(said: pytest.LogCaptureFixture) -> None:
    trouble = Trouble(lambda: 0.0)
    trouble.begin("lease", Unavailable("it is full"))
    trouble.begin("news", Unavailable("it is silent"))
    assert (bool(trouble), trouble.reason) == (True, "it is silent")
    trouble.end("news")
    assert (bool(trouble), trouble.reason) == (True, "it is full")
    trouble.end("lease")
    assert (bool(trouble), trouble.reason) == (False, "")
    assert said.messages == [
        "cut off from the cluster: it is full",
        "cut off from the cluster: it is silent",
        "the metadata server answers again",
    ]


def test_what_comes_and_goes_is_said_now_and_then(said: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    trouble = Trouble(lambda: now_s[0])
    for _ in range(10):
        for _ in range(5):
            trouble.begin("news", Unavailable("it is full"))
            assert trouble
        trouble.end("news")
        assert not trouble
        now_s[0] += 0.1
    assert len(said.messages) == 2
    now_s[0] += CLUSTER_SAID_S
    trouble.begin("news", Unavailable("it is full"))
    assert len(said.messages) == 3


def test_what_stays_is_said_once(said: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    trouble = Trouble(lambda: now_s[0])
    for _ in range(100):
        trouble.begin("news", Unavailable("it is full"))
        now_s[0] += CLUSTER_SAID_S / 10
    assert len(said.messages) == 1
