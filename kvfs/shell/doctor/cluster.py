"""The cluster that a store belongs to."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvfs.belonging import read_belonging
from kvfs.errors import InvalidInput
from kvfs.settings.load import load_config_of_store
from kvfs.settings.words import ClusterConfig
from kvfs.shell.doctor.finding import Finding, Level


@dataclass(frozen=True, slots=True)
class Joined:
    """The cluster of a store's next start, as far as the store says. With `--join` only, it says
    neither password nor address."""

    config: ClusterConfig
    is_written: bool  # in its kvfs.toml
    is_member: bool  # it was one already, so that its names are there


def cluster_of(store: Path) -> Joined | None:
    """None for a store that is alone, and where it cannot be told, which others say."""
    try:
        config = load_config_of_store([store]).cluster
        belonging = read_belonging(store)
    except (InvalidInput, OSError):
        return None
    if config is not None:
        is_member = belonging is not None and belonging.cluster == config.name
        return Joined(config, is_written=True, is_member=is_member)
    if belonging is None:
        return None
    return Joined(
        ClusterConfig(belonging.metadata, belonging.cluster), is_written=False, is_member=True
    )


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
