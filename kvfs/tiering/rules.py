"""Which rule holds for a blob of a node."""

from kvfs.config import COPIES_PATHS_MAX
from kvfs.node import Node
from kvfs.settings.words import TierRule
from kvfs.tiering.policy import rule_of


class Rules:
    """In the node's thread."""

    def __init__(self, node: Node) -> None:
        self._meta = node.meta
        self.all = node.config.tier_rules

    def of(self, digest: bytes) -> TierRule:
        """By the paths that the blob has now."""
        if not self.all:  # nor is anybody asked for paths
            return rule_of((), [b""])
        held = self._meta.held_paths(digest, (0, 0, b""), COPIES_PATHS_MAX)
        return rule_of(self.all, [one.path for one in held])
