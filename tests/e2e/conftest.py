"""What end-to-end tests with real engines share. An engine takes 10 s to start, or 90 s on a busy
machine: tests of one module share one where they can."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.mounted import mounted, place  # noqa: F401  fixtures
from tests.e2e.posix_ground import ground, open_mount  # noqa: F401  fixtures
from tests.engines import EngineProcess, Site, StartEngine

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def small_model(vllm_python: Path) -> Path:
    """A random model of 2 MB, quick enough to prefill thousands of tokens in a test."""
    directory = ROOT / ".envs" / "models" / "small"
    builder = ROOT / "scripts" / "build_demo_model.py"
    sizes = ["--hidden=128", "--inter=256", "--layers=4", "--heads=4", "--kv-heads=2"]
    command = [vllm_python, builder, directory, *sizes, "--vocab=1024"]
    subprocess.run(command, check=True, timeout=300)
    return directory


@pytest.fixture(scope="session")
def hybrid_model(vllm_python: Path, small_model: Path) -> Path:
    """The same for a model of two KV groups: layers with a window of 512 tokens, and without."""
    directory = small_model.parent / "hybrid"
    builder = Path(__file__).parent / "programs" / "build_hybrid_model.py"
    subprocess.run([vllm_python, builder, small_model, directory], check=True, timeout=300)
    return directory


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("site"))
    yield site
    site.node.close()


@pytest.fixture
def own_site(tmp_path: Path) -> Iterator[Site]:
    """A site of one test."""
    site = Site(tmp_path)
    yield site
    site.node.close()


@pytest.fixture(scope="module")
def start_engine(
    vllm_python: Path, small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartEngine]:
    """Start an engine and wait until it takes prompts:
    `start_engine(store, model=None, **rest)`."""
    folder = tmp_path_factory.mktemp("engines")
    started: list[EngineProcess] = []

    def start(
        store: Path | None, *, model: Path | None = None, **rest: dict[str, object]
    ) -> EngineProcess:
        log = folder / f"engine-{len(started)}.log"
        engine = EngineProcess(vllm_python, model or small_model, store, log, **rest)
        started.append(engine)
        return engine.wait_ready()

    yield start
    for engine in started:
        engine.close()
