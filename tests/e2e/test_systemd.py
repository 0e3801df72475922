"""The unit for systemd, and what it relies on: word when it serves, lines for the journal."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.client import Client
from tests.mounts import is_mounted

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "scripts" / "systemd" / "kvfs@.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_is_sound(tmp_path: Path) -> None:
    kvfs = tmp_path / "kvfs"
    kvfs.write_text("#!/bin/sh\n")
    kvfs.chmod(0o755)
    unit = tmp_path / "kvfs@mnt-kv.service"
    unit.write_text(UNIT.read_text().replace("/usr/local/bin/kvfs", str(kvfs)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=one", unit],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def commands_of(key: str) -> list[str]:
    """The words behind `key=` in the unit, as systemd expands them for /mnt/kv."""
    (line,) = [line for line in UNIT.read_text().splitlines() if line.startswith(f"{key}=")]
    words = line.removeprefix(f"{key}=").removeprefix("-").split()
    return [word.replace("%f", "/mnt/kv").replace("%i", "mnt-kv") for word in words]


def test_the_words_of_the_unit_are_words_of_the_command() -> None:
    from kvfs.shell.arguments import build_parser

    started = build_parser().parse_args(commands_of("ExecStart")[1:])
    assert (started.command, started.mountpoint) == ("mount", Path("/mnt/kv"))
    assert started.foreground
    assert started.config == Path("/etc/kvfs/mnt-kv.toml")
    stopped = build_parser().parse_args(commands_of("ExecStop")[1:])
    assert (stopped.command, stopped.mountpoint) == ("umount", Path("/mnt/kv"))


def test_the_supervisor_hears_when_the_mount_serves(tmp_path: Path) -> None:
    store, where = tmp_path / "store", tmp_path / "mnt"
    reading, writing = os.pipe()
    status = os.fstat(writing)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(tmp_path / "notify"))
        notify.settimeout(30)
        process = subprocess.Popen(
            [sys.executable, "-m", "kvfs", "mount", "--foreground", "--store", store, "--", where],
            stderr=writing,
            env={
                **os.environ,
                "NOTIFY_SOCKET": str(tmp_path / "notify"),
                "JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}",
            },
        )
        os.close(writing)
        try:
            assert notify.recv(1000) == b"READY=1"
            assert is_mounted(where)
            (where / "a").write_bytes(b"data")
            with Client(store) as client:
                assert client.status()["pid"] == process.pid
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
            notify.setblocking(False)
            with pytest.raises(BlockingIOError):
                notify.recv(1000)
        finally:
            process.kill()
            process.wait()
            if is_mounted(where):
                subprocess.run(["umount", "-l", where], check=False)
    with open(reading, encoding="utf-8") as errors:
        lines = errors.read().splitlines()
    assert f"<6>mount.run: mounted {store} at {where}" in lines
    assert all(line.startswith("<6>") for line in lines), lines
    assert "INFO mount.run: mounted" in (store / "node.log").read_text()
