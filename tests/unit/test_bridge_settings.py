"""The `kvfs.` keys of an engine's configuration."""

from pathlib import Path
from typing import Any

import pytest

from gpu_bridge.settings import BridgeSettings, parse_settings
from kvfs.config import BRIDGE_THREADS, MIB
from kvfs.errors import InvalidInput
from kvfs.home import default_store


def test_nothing_has_to_be_set() -> None:
    settings = parse_settings({"other.key": 1})
    assert settings == BridgeSettings(default_store(), threads=BRIDGE_THREADS)


def test_what_is_set_is_taken() -> None:
    given = {
        "kvfs.store": "/srv/kv",
        "kvfs.chunk_tokens": 512,
        "kvfs.staging_bytes": "64MiB",
        "kvfs.save": False,
        "kvfs.deadline_s": 2,
    }
    settings = parse_settings(given)
    assert (settings.store, settings.chunk_tokens) == (Path("/srv/kv"), 512)
    assert (settings.staging_bytes, settings.save, settings.load) == (64 * MIB, False, True)
    assert settings.deadline_s == 2.0


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("stroe", "/srv/kv", r"kvfs\.stroe: unknown key; known are kvfs\.store, kvfs\.chunk_tok"),
        ("store", 7, "no path"),
        ("store", "", "no path"),
        ("chunk_tokens", 0, "whole number of at least 1"),
        ("chunk_tokens", True, "whole number"),
        ("threads", 1000, "at most 64"),
        ("staging_bytes", "lots", "is no size; write for example"),
        ("staging_bytes", 0, "more than nothing"),
        ("load", "yes", "true or false"),
        ("deadline_s", 0, "number of seconds"),
        ("deadline_s", float("nan"), "number of seconds"),
    ],
)
def test_a_bad_value_is_one_precise_error(key: str, value: Any, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason) as caught:
        parse_settings({f"kvfs.{key}": value})
    assert caught.value.subject == f"kvfs.{key}"
