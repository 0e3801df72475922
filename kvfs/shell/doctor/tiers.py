"""The tiers of a store's configuration."""

from collections.abc import Iterator
from pathlib import Path

from kvfs.errors import InvalidInput
from kvfs.home import load_config_of_store
from kvfs.shell.doctor.finding import Finding, Level


def check_tiers(store: Path) -> Iterator[Finding]:
    """That they are of no use yet, where there are any."""
    try:
        tiers = load_config_of_store([store]).tiers
    except InvalidInput:
        return  # which is said of the settings
    if tiers:
        names = ", ".join(tier.name for tier in tiers)
        advice = "take [[tiers]] out, or leave them for a later version"
        yield Finding("tiers", Level.WARN, f"{names}: nodes do not use tiers yet", advice)
