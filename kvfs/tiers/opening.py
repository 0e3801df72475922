"""A configuration's tier, opened."""

from kvfs.errors import InvalidInput
from kvfs.settings.words import TierConfig, TierKind
from kvfs.tiers.contract import WritableTier
from kvfs.tiers.directory import DirectoryTier


def open_tier(config: TierConfig, node_id: str, *, must_exist: bool = False) -> WritableTier:
    """Open a tier, for its user to close. `node_id`: of this node, unlike all others'.
    `must_exist`: what is none yet is not made one. Raises `InvalidInput` for what cannot be a tier,
    and `TierTrouble`."""
    if config.kind is not TierKind.OBJECT:
        return DirectoryTier(config, node_id, must_exist=must_exist)
    try:
        from kvfs.tiers.object import ObjectTier  # here: 12 MB that most nodes never need
    except ImportError as error:
        raise InvalidInput(
            f"tier {config.name}", f"needs obstore; pip install 'kvfs[object]' ({error})"
        ) from error
    return ObjectTier(config, must_exist=must_exist)
