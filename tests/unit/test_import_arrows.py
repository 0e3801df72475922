"""Imports flow one way: what may import what, read from the source."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kvfs", "mount", "gpu_bridge")

# Decisions, formats and words: no I/O, no clock, no chance, and nothing of ours that has them.
PURE = {
    "kvfs.errors",
    "kvfs.config",
    "kvfs.settings.keys",
    "kvfs.settings.prefetch",
    "kvfs.settings.rules",
    "kvfs.settings.sizes",
    "kvfs.settings.words",
    "kvfs.shell.configs",
    "kvfs.names",
    "kvfs.metrics",
    "kvfs.chunk",
    "kvfs.digest",
    "kvfs.health",
    "kvfs.prefetch.machine",
    "kvfs.prefetch.successors",
    "kvfs.prefetch.unread",
    "kvfs.prefetch.words",
    "kvfs.replay.plan",
    "kvfs.replay.report",
    "kvfs.replay.trace",
    "kvfs.schedule",  # a package whose head gives its words: see HEADS
    "kvfs.schedule.board",
    "kvfs.schedule.choice",
    "kvfs.schedule.flight",
    "kvfs.schedule.jobs",
    "kvfs.schedule.machine",
    "kvfs.schedule.reads",
    "kvfs.schedule.slots",
    "kvfs.schedule.speed",
    "kvfs.schedule.tiers",
    "kvfs.schedule.timers",
    "kvfs.schedule.views",
    "kvfs.schedule.width",
    "kvfs.schedule.words",
    "kvfs.wire",
    "kvfs.arguments",
    "kvfs.evict",
    "kvfs.replicate",
    "kvfs.stage",
    "kvfs.meta.contract",
    "kvfs.meta.tier_contract",
    "kvfs.meta.records",
    "kvfs.meta.url",
    "kvfs.meta.chunk_index",
    "kvfs.arriving",
    "kvfs.cluster.pieces",
    "kvfs.peers.address",
    "kvfs.peers.fields",
    "kvfs.peers.messages",
    "kvfs.tiering.policy",
    "kvfs.tiers.counters",
    "kvfs.transfer.words",
    "mount.states",
    "mount.numbers",
    "mount.directories",
    "mount.errnos",
    "gpu_bridge.plan",
    "gpu_bridge.ledger",
    "gpu_bridge.reports",
    "gpu_bridge.layout",
    "gpu_bridge.shard",
}
# Pure over tensors that they are given: shapes, strides and views.
OVER_TENSORS = {"gpu_bridge.layout"}
IMPURE = {
    "asyncio", "lmdb", "multiprocessing", "pyfuse3", "random", "select", "selectors",
    "shutil", "signal", "socket", "subprocess", "tempfile", "threading", "time", "torch", "trio",
    "zmq",
}  # fmt: skip

# Of `os`, what only turns values into others.
PURE_OS = {"fsdecode", "fsencode", "fspath", "strerror"}

# The command composes everything, but only when it runs: inside functions.
COMPOSERS = {
    "kvfs.cli", "kvfs.shell.operate", "kvfs.shell.doctor.fuse", "kvfs.shell.doctor.mounts",
}  # fmt: skip

# Packages with one home.
HOMES = {
    "zmq": ("kvfs.peers",),
    "lmdb": ("kvfs.meta",),
    "redis": ("kvfs.meta",),
    "obstore": ("kvfs.tiers",),
    "pyfuse3": ("mount",),
    "torch": ("gpu_bridge",),
    "vllm": ("gpu_bridge",),
    "lmcache": ("gpu_bridge",),
    "rich": ("kvfs",),
}

HEADS = (  # of packages; but for one that is pure as a whole, they are empty
    "kvfs", "kvfs.meta", "kvfs.peers", "kvfs.prefetch", "kvfs.replay", "kvfs.requests",
    "kvfs.settings", "kvfs.shell", "kvfs.shell.doctor", "kvfs.tiering", "kvfs.tiers",
    "kvfs.transfer", "mount", "gpu_bridge",
)  # fmt: skip
LOOP_FREE = (
    "kvfs.client", "kvfs.cli", "kvfs.shell", "kvfs.inspect", "kvfs.meta", "kvfs.peers",
    "kvfs.reader", "kvfs.settings", "kvfs.tiers", "kvfs.transfer", "kvfs.workers", "gpu_bridge",
)  # fmt: skip

# What an engine process and every command load first: it must not pull these in, not even through
# another module of ours.
LIGHT = ("kvfs.client", "kvfs.cli", "kvfs.shell.configs", "kvfs.chunk")
HEAVY = {"trio", "lmdb", "torch", "pyfuse3", "zmq", "vllm", "lmcache", "rich", "numpy", "obstore"}


@dataclass(frozen=True, slots=True)
class Arrow:
    """One import statement's target, as a full module name."""

    source: str
    target: str
    is_lazy: bool  # inside a function, or only for type checkers

    @property
    def package(self) -> str:
        return self.target.split(".", 1)[0]


def read_modules() -> dict[str, Path]:
    modules = {}
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            modules[name.removesuffix(".__init__")] = file
    return modules


MODULES = read_modules()


def arrows_of(module: str) -> Iterator[Arrow]:
    file = MODULES[module]
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(file.read_text(encoding="utf-8"))
    yield from _walk(tree, module, package, is_lazy=False)


def _walk(node: ast.AST, module: str, package: str, *, is_lazy: bool) -> Iterator[Arrow]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Arrow(module, alias.name, is_lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                above = package.split(".")[: len(package.split(".")) - child.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in child.names:
                full = f"{base}.{alias.name}"
                yield Arrow(module, full if full in MODULES else base, is_lazy)
        else:
            lazy = is_lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            lazy = lazy or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            )
            yield from _walk(child, module, package, is_lazy=lazy)


ARROWS = [arrow for module in MODULES for arrow in arrows_of(module)]


def is_in(module: str, homes: tuple[str, ...]) -> bool:
    return any(module == home or module.startswith(f"{home}.") for home in homes)


def show(arrows: list[Arrow]) -> str:
    return "; ".join(f"{arrow.source} imports {arrow.target}" for arrow in arrows)


def test_there_is_something_to_look_at() -> None:
    assert len(ARROWS) > 50
    assert any(a.source == "kvfs.client" and a.target == "kvfs.errors" for a in ARROWS)
    assert any(
        a.source == "kvfs.shell.operate" and a.package == "mount" and a.is_lazy for a in ARROWS
    )


def test_mount_and_bridge_do_not_know_each_other() -> None:
    wrong = [a for a in ARROWS if {a.source.split(".", 1)[0], a.package} == {"mount", "gpu_bridge"}]
    assert not wrong, show(wrong)


def test_the_store_knows_neither_mount_nor_bridge() -> None:
    upward = [
        a for a in ARROWS if a.source.startswith("kvfs") and a.package in ("mount", "gpu_bridge")
    ]
    wrong = [a for a in upward if not (a.is_lazy and a.source in COMPOSERS)]
    assert not wrong, show(wrong)


def test_nothing_but_the_command_knows_the_shell() -> None:
    commands = ("kvfs.cli", "kvfs.__main__", "kvfs.shell")
    wrong = [a for a in ARROWS if is_in(a.target, commands) and not is_in(a.source, commands)]
    assert not wrong, show(wrong)


def test_modules_named_here_exist() -> None:
    named = PURE | OVER_TENSORS | COMPOSERS | set(LIGHT) | set(LOOP_FREE) | set(HEADS)
    assert not named - MODULES.keys() - set(PACKAGES)


@pytest.mark.parametrize("module", sorted(PURE))
def test_pure_modules_import_only_pure_ones(module: str) -> None:
    impure = IMPURE - {"torch"} if module in OVER_TENSORS else IMPURE
    wrong = [
        a
        for a in arrows_of(module)
        if a.package in impure or (a.package in PACKAGES and a.target not in PURE)
    ]
    # A package's own __init__ runs before its modules, and must then be as pure.
    wrong = [a for a in wrong if a.target not in HEADS]
    assert not wrong, show(wrong)


@pytest.mark.parametrize("module", sorted(PURE))
def test_pure_modules_ask_the_system_nothing(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    assert not any(isinstance(n, ast.ImportFrom) and n.module == "os" for n in ast.walk(tree))
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "os"
    }
    assert {name for name in used - PURE_OS if not name.startswith("O_")} == set()
    calls = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    assert not calls & {"open", "input", "print"}


@pytest.mark.parametrize("package", HEADS)
def test_package_heads_import_nothing(package: str) -> None:
    assert [a.target for a in arrows_of(package)] == []


@pytest.mark.parametrize("package", sorted(HOMES))
def test_packages_with_one_home(package: str) -> None:
    homes = (*HOMES[package], "kvfs.shell.doctor.fuse")  # which looks which libfuse is loaded
    wrong = [a for a in ARROWS if a.package == package and not is_in(a.source, homes)]
    assert not wrong, show(wrong)


def test_trio_stays_with_the_owner() -> None:
    """The client, the shell and the bridge are for processes that run no event loop."""
    wrong = [a for a in ARROWS if a.package == "trio" and is_in(a.source, LOOP_FREE)]
    assert not wrong, show(wrong)


@pytest.mark.parametrize("module", LIGHT)
def test_what_everyone_loads_is_light(module: str) -> None:
    seen: set[str] = set()
    heavy: list[Arrow] = []
    todo = [module]
    while todo:
        current = todo.pop()
        if current in seen or current not in MODULES:
            continue
        seen.add(current)
        for arrow in arrows_of(current):
            if arrow.is_lazy:
                continue
            if arrow.package in HEAVY:
                heavy.append(arrow)
            todo.append(arrow.target)
    assert not heavy, show(heavy)


def test_the_architecture_names_every_module() -> None:
    """But those of the shell, of peers and of what vLLM calls, which it names as a whole."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## The modules")[2].partition("\n## ")[0]
    named = {word.rpartition(".")[2] for word in re.findall(r"`([\w.]+)`", table)}
    as_a_whole = ("kvfs.shell", "kvfs.peers", "gpu_bridge.vllm_")
    wrong = [
        module
        for module, file in MODULES.items()
        if not file.name.startswith("__")
        and not module.startswith(as_a_whole)
        and module.rpartition(".")[2] not in named
    ]
    assert not wrong, f"docs/architecture.md does not say what these are for: {', '.join(wrong)}"


def test_what_tests_share_lies_beside_them() -> None:
    """No test imports another's file, and no script anything of the tests."""
    wrong = []
    for file in (*(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("tests"):
                continue
            names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
            if "scripts" in file.parts or any(name.startswith("test_") for name in names):
                wrong.append(f"{file.relative_to(ROOT)} imports {node.module}")
    assert not wrong, "; ".join(wrong)
