"""What every metadata engine must do: subclass `MetaSuite`, give it `reopen`, and run it."""

from tests.contract.meta_chunks import MetaChunksSuite
from tests.contract.meta_content import MetaContentSuite
from tests.contract.meta_names import MetaNamesSuite


class MetaSuite(MetaNamesSuite, MetaContentSuite, MetaChunksSuite):
    """See `OfEngine` for what a subclass gives."""
