"""The cluster that a store belongs to."""

from collections.abc import Iterator
from pathlib import Path

from kvfs.belonging import read_belonging
from kvfs.errors import InvalidInput
from kvfs.home import load_config_of_store
from kvfs.shell.doctor.finding import Finding, Level


def check_cluster(store: Path) -> Iterator[Finding]:
    """The cluster that a store belongs to, and whether its next start finds it."""
    try:
        config = load_config_of_store([store]).cluster
    except InvalidInput:
        return  # which is said of the settings
    try:
        belonging = read_belonging(store)
    except InvalidInput as error:
        yield Finding("cluster", Level.FAIL, str(error), "no node starts before this is mended")
        return
    if belonging is None:
        if config is not None:
            yield Finding("cluster", Level.OK, f"joins {config.name} at its next start")
        return
    if config is None:
        found = f"belongs to {belonging.cluster}, and its kvfs.toml does not say so"
        advice = (
            f"start it with --join {belonging.metadata}, or write [cluster] there, so that commands"
            " can start its node too"
        )
        yield Finding("cluster", Level.WARN, found, advice)
    elif config.name != belonging.cluster:
        found = f"belongs to {belonging.cluster}, and its kvfs.toml says {config.name}"
        advice = "its next start brings the names of its files into the latter"
        yield Finding("cluster", Level.WARN, found, advice)
    else:
        yield Finding("cluster", Level.OK, f"belongs to {belonging.cluster}")
