"""Our patches of pyfuse3 fit the release that we pin, and what is installed has all or none."""

import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import trio

pyfuse3 = pytest.importorskip("pyfuse3", reason="the mount's package is not installed")

ROOT = Path(__file__).parents[2]
PATCHES = tuple(f"pyfuse3-{what}.patch" for what in ("passthrough", "noflush", "wait", "reuse"))
PINS = (ROOT / "requirements" / "main.txt").read_text()
NAMES = {
    "passthrough_enabled",
    "get_session_fd",
    "withdraw_open",
    "reusable_opens",
    "keep_attributes",
}


def is_patched() -> bool:
    return hasattr(pyfuse3, "passthrough_enabled")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The pinned release, unpacked."""
    pin = re.search(r"^pyfuse3==(\S+)$", PINS, re.MULTILINE)
    assert pin is not None, "requirements/main.txt pins pyfuse3"
    archive = ROOT / ".deps" / "sdists" / f"pyfuse3-{pin[1]}.tar.gz"
    if not archive.exists():
        pytest.skip(f"{archive.name} is not here: scripts/setup passthrough downloads it")
    if shutil.which("patch") is None:
        pytest.skip("the command patch is missing")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path)  # made by set-up, of a pinned release
    return tmp_path / f"pyfuse3-{pin[1]}"


def test_the_patches_fit_the_pinned_release_exactly(source: Path) -> None:
    for name in PATCHES:
        patch = ROOT / "patches" / name
        command = ["patch", "--strip=1", "--fuzz=0", "--batch", f"--input={patch}"]
        done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stdout
        assert "offset" not in done.stdout, "made for another release"
    types = (source / "src" / "pyfuse3" / "__init__.pyi").read_text()
    assert "backing_id: int" in types
    assert "noflush: bool" in types
    assert "reusable: bool" in types
    assert all(name in types for name in NAMES)


def skip_what_is_older() -> None:
    if is_patched() and not hasattr(pyfuse3, "keep_attributes"):
        pytest.skip(
            "pyfuse3 was built before the last patch: scripts/setup passthrough does it anew"
        )


def test_what_is_installed_has_all_of_the_patches_or_nothing() -> None:
    skip_what_is_older()
    have = {name for name in NAMES if hasattr(pyfuse3, name)}
    assert have == (NAMES if is_patched() else set())
    for name in ("backing_id", "noflush", "reusable"):
        assert hasattr(pyfuse3.FileInfo(), name) == is_patched()
    for name in ("enable_passthrough", "request_wait_us"):
        assert hasattr(pyfuse3.Operations, name) == is_patched()


def test_the_patched_one_does_nothing_unless_asked() -> None:
    if not is_patched():
        pytest.skip("pyfuse3 is the stock one: scripts/setup passthrough builds the other")
    skip_what_is_older()
    assert pyfuse3.passthrough_enabled is False
    assert pyfuse3.Operations.enable_passthrough is False
    assert pyfuse3.Operations.request_wait_us == 0
    assert pyfuse3.FileInfo(fh=1).backing_id == 0
    assert pyfuse3.FileInfo(fh=1, backing_id=7).backing_id == 7
    assert not pyfuse3.FileInfo(fh=1).noflush
    assert pyfuse3.FileInfo(fh=1, noflush=True).noflush
    assert not pyfuse3.FileInfo(fh=1).reusable
    assert pyfuse3.FileInfo(fh=1, reusable=True).reusable
    assert pyfuse3.reusable_opens() == []
    with pytest.raises(KeyError):
        pyfuse3.withdraw_open(1)
    with pytest.raises(RuntimeError, match="init"):
        pyfuse3.get_session_fd()


def test_what_trio_has_to_do_is_where_the_patch_looks() -> None:
    """It has no public names: with another trio, requests are waited for as before."""

    async def find() -> tuple[int, int, float]:
        runner = trio._core._run.GLOBAL_RUN_CONTEXT.runner
        events_fd = runner.io_manager._epoll.fileno()  # type: ignore[attr-defined]
        left_s = runner.deadlines.next_deadline() - runner.clock.current_time()
        return events_fd, len(runner.runq), left_s

    events_fd, runnable, left_s = trio.run(find)
    assert events_fd >= 0
    assert runnable == 0
    assert left_s > 0
