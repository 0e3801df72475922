"""What systemd hears, and what its journal reads."""

import logging
import os
import socket
import sys
from pathlib import Path

import pytest

from kvfs.supervisor import JournalFormatter, is_in_journal, tell_supervisor


@pytest.mark.parametrize("is_abstract", [False, True])
def test_a_state_arrives(
    is_abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"@kvfs-test-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(name.replace("@", "\0"))
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        tell_supervisor("READY=1")
        receiver.settimeout(10)
        assert receiver.recv(100) == b"READY=1"


@pytest.mark.parametrize("address", [None, "", "nonsense", "vsock:2:5"])
def test_no_supervisor(
    address: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if address is None:
        monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    else:
        monkeypatch.setenv("NOTIFY_SOCKET", address)
    tell_supervisor("READY=1")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_supervisor_that_has_gone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    allow_warnings: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    allow_warnings.append("notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    tell_supervisor("READY=1")
    assert str(tmp_path / "notify") in caplog.text


def test_every_line_says_how_bad_it_is() -> None:
    def line(level: int, text: str) -> str:
        return JournalFormatter().format(
            logging.LogRecord("kvfs.node", level, "", 0, "%s", (text,), None)
        )

    assert line(logging.INFO, "serving") == "<6>kvfs.node: serving"
    assert line(logging.WARNING, "a\nb") == "<4>kvfs.node: a\n<4>b"
    assert line(logging.ERROR, "x").startswith("<3>")
    assert line(logging.CRITICAL, "x").startswith("<2>")
    assert line(logging.DEBUG, "x").startswith("<7>")


def test_whether_the_journal_reads_standard_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(tmp_path / "errors", "w", encoding="utf-8") as file:
        monkeypatch.setattr(sys, "stderr", file)
        status = os.fstat(file.fileno())
        monkeypatch.delenv("JOURNAL_STREAM", raising=False)
        assert not is_in_journal()
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino + 1}")
        assert not is_in_journal()
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        assert is_in_journal()
