"""What every test may use. Each fixture's docstring says what it gives.

Two promises hold for all of them: what a test started is gone when it ends, whatever happened, and
a WARNING in kvfs's log that the test did not announce fails it.
"""

import importlib.util
import logging
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import trio

from mount.point import find_mount
from scripts.s3_rig import PYTHON as S3_PYTHON
from scripts.s3_rig import S3Server
from tests.commands import kvfs
from tests.mounts import MountProcess
from tests.processes import NodeProcess

ROOT = Path(__file__).parent.parent
OUR_LOGGERS = ("kvfs", "mount", "gpu_bridge")

# How fast an example runs on a busy machine says nothing of what it tests.
hypothesis.settings.register_profile(
    "kvfs", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("kvfs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark by place, and skip what this machine cannot run, saying why."""
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "e2e" in item.path.relative_to(ROOT).parts:
            item.add_marker(pytest.mark.e2e)
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(no_gpu)


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")


@pytest.fixture
def allow_warnings() -> list[str]:
    """Patterns of warnings expected in this process; a test appends its own."""
    return []


@pytest.fixture(autouse=True)
def _no_unexpected_warnings(allow_warnings: list[str]) -> Iterator[None]:
    collector = _Collector()
    for name in OUR_LOGGERS:
        logging.getLogger(name).addHandler(collector)
    yield
    for name in OUR_LOGGERS:
        logging.getLogger(name).removeHandler(collector)
    unexpected = [
        line
        for line in collector.lines
        if not any(re.search(pattern, line) for pattern in allow_warnings)
    ]
    assert not unexpected, "unexpected in the log: " + "; ".join(unexpected)


StartNode = Callable[..., NodeProcess]
StartMount = Callable[..., MountProcess]


@pytest.fixture
def start_node(tmp_path: Path) -> Iterator[StartNode]:
    """Start `kvfs serve` and wait until it serves:

    `start_node(store=None, *, config="", extra_stores=(), allow=None) -> NodeProcess`

    `store`: its directory, by default one below tmp_path. `config`: TOML text. `allow`: a pattern
    of log lines that may be warnings. All are stopped at the end, and their logs looked through.
    """
    started: list[NodeProcess] = []

    def start(
        store: Path | None = None,
        *,
        config: str = "",
        extra_stores: Sequence[Path] = (),
        allow: str | None = None,
    ) -> NodeProcess:
        store = store or tmp_path / "store"
        stem = f"node-{len(started)}"
        arguments = _node_arguments([store, *extra_stores], config, tmp_path / f"{stem}.toml")
        node = NodeProcess(store, arguments, tmp_path / f"{stem}.log", allow)
        started.append(node)
        return node

    yield start
    _close_all(started)


@pytest.fixture
def start_mount(tmp_path: Path) -> Iterator[StartMount]:
    """Start `kvfs mount --foreground` and wait until it serves:

    `start_mount(store=None, *, mountpoint=None, config="", extra_stores=(), allow=None)
    -> MountProcess`

    As `start_node`; the mount point is made when it is missing, by default below tmp_path. All are
    unmounted at the end, also when their process is dead or hangs.
    """
    started: list[MountProcess] = []

    def start(
        store: Path | None = None,
        *,
        mountpoint: Path | None = None,
        config: str = "",
        extra_stores: Sequence[Path] = (),
        allow: str | None = None,
    ) -> MountProcess:
        store = store or tmp_path / "store"
        mountpoint = mountpoint or tmp_path / "mnt"
        stem = f"mount-{len(started)}"
        arguments = _node_arguments([store, *extra_stores], config, tmp_path / f"{stem}.toml")
        mount = MountProcess(store, mountpoint, arguments, tmp_path / f"{stem}.log", allow)
        started.append(mount)
        mount.wait_serving()
        return mount

    yield start
    _close_all(started)


@pytest.fixture
def threads_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a clock that jumps when all tasks wait, and does not know of threads."""

    async def run_sync(call: Callable[..., Any], *words: Any, **options: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return call(*words)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)


@pytest.fixture
def where(tmp_path: Path) -> Iterator[Path]:
    """A mount point whose mounts, and their processes, are gone afterwards."""
    mountpoint = tmp_path / "mnt"
    yield mountpoint
    while (entry := find_mount(mountpoint)) is not None:
        kvfs("umount", entry.mountpoint, "--lazy")


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server of S3's protocol, for all tests of a module."""
    if not S3_PYTHON.exists():
        pytest.skip("there is no S3 server: run scripts/setup tiers")
    server = S3Server(tmp_path_factory.mktemp("s3") / "log")
    yield server
    server.close()


def _node_arguments(stores: Sequence[Path], config: str, file: Path) -> list[str]:
    arguments = [word for store in stores for word in ("--store", str(store))]
    if config:
        file.write_text(config)
        arguments += ["--config", str(file)]
    return arguments


def _close_all(started: Sequence[NodeProcess | MountProcess]) -> None:
    problems: list[BaseException] = []
    for process in reversed(started):
        try:
            process.close()
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            problems.append(error)
    if problems:
        raise problems[0]


def _environment_python(name: str) -> Path:
    python = ROOT / ".envs" / name / "bin" / "python"
    assert python.exists(), f"run scripts/setup {name} first"
    return python


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter of the environment with vLLM and kvfs's connector."""
    return _environment_python("vllm")


@pytest.fixture(scope="session")
def lmcache_python() -> Path:
    """The interpreter of the environment with LMCache and vLLM."""
    return _environment_python("lmcache")


@pytest.fixture(scope="session")
def demo_model(vllm_python: Path) -> Path:
    """A directory with the 105M random model of `make run`; built once, kept between runs."""
    directory = ROOT / ".envs" / "models" / "demo"
    builder = ROOT / "scripts" / "build_demo_model.py"
    subprocess.run([vllm_python, builder, directory], check=True, timeout=300)
    return directory
