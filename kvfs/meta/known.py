"""Records of the server that a node has read, for as long as nobody has changed them.

Whoever fills it must tell it of every change (`forget`), from the feed; it then never has a record
older than the last entry of the feed that was heard.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Protocol

from kvfs.config import (
    CLUSTER_GROUPS_CACHED_MAX,
    CLUSTER_NAMES_TOLD_MAX,
    CLUSTER_RECORDS_CACHED_MAX,
)
from kvfs.meta.bulk import by_directory
from kvfs.meta.records import NO_DIRENT, is_dirent
from kvfs.meta.shared import (
    FIRST_PAGE_MEMBERS,
    KEPT_IF_THERE,
    Commit,
    Page,
    Record,
    SharedTable,
)

_Group = tuple[SharedTable, bytes]


class ServerSource(Protocol):
    """As `Source`, and as a server is asked for many at once."""

    def values(self, wanted: Sequence[Record]) -> list[bytes | None]: ...

    def members(self, page: Page) -> tuple[bytes, ...]: ...

    def dirents(self, groups: Mapping[bytes, Sequence[bytes]]) -> list[bytes]: ...

    def pages(self, wanted: Sequence[Page]) -> list[tuple[bytes, ...]]: ...


class Known:
    """`Source` before the server. The oldest records go first."""

    def __init__(self, source: ServerSource) -> None:
        self._source = source
        self._values: dict[SharedTable, OrderedDict[bytes, bytes | None]] = {
            table: OrderedDict() for table in SharedTable
        }
        self._groups: OrderedDict[_Group, dict[Page, tuple[bytes, ...]]] = OrderedDict()
        # Directory entries that nobody asked for yet: they are not to push out what was asked for.
        self._told: OrderedDict[bytes, bytes] = OrderedDict()

    def values(self, wanted: Sequence[Record]) -> list[bytes | None]:
        missing = [record for record in wanted if record.key not in self._values[record.table]]
        if not missing:
            return [self._values[record.table][record.key] for record in wanted]
        read = dict(zip(missing, self._source.values(missing), strict=True))
        answer = [read[r] if r in read else self._values[r.table][r.key] for r in wanted]
        for record, value in read.items():
            self._keep(record, value)
        return answer

    def dirents(self, keys: Sequence[bytes]) -> list[bytes]:
        known = self._values[SharedTable.DIRENT]
        missing = [key for key in keys if key not in known]
        if missing and self._told:
            told = self._told
            known.update((key, told.pop(key)) for key in missing if key in told)
            missing = [key for key in missing if key not in known]
        if missing:
            groups = by_directory(missing)
            found = self._source.dirents(groups)
            values = [None if value == NO_DIRENT else value for value in found]
            known.update(zip(chain.from_iterable(groups.values()), values, strict=True))
        answer = [known[key] or NO_DIRENT for key in keys]
        while len(known) > CLUSTER_RECORDS_CACHED_MAX:
            known.popitem(last=False)
        return answer

    def members(self, page: Page) -> tuple[bytes, ...]:
        group = page.table, page.group
        pages = self._groups.get(group)
        if pages is not None and page in pages:
            return pages[page]
        members = self._source.members(page)
        if page.limit <= FIRST_PAGE_MEMBERS:  # else of a listing: hardly asked for again
            self._keep_page(page, members)
        return members

    def read_pages_ahead(self, pages: Iterable[Page]) -> None:
        """Have the first pages of many groups in one round trip."""
        missing = [p for p in pages if p not in self._groups.get((p.table, p.group), {})]
        if missing:
            for page, members in zip(missing, self._source.pages(missing), strict=True):
                self._keep_page(page, members)

    def _keep_page(self, page: Page, members: tuple[bytes, ...]) -> None:
        if not members and page.table in KEPT_IF_THERE:
            return
        group = page.table, page.group
        pages = self._groups.get(group)
        if pages is None:
            pages = self._groups[group] = {}
            if len(self._groups) > CLUSTER_GROUPS_CACHED_MAX:
                self._groups.popitem(last=False)
        pages[page] = members

    def forget(self, records: Iterable[Record]) -> None:
        """These were changed by somebody."""
        for record in records:
            self._values[record.table].pop(record.key, None)
            if record.table is SharedTable.DIRENT:
                self._told.pop(record.key, None)
            if record.is_grouped:
                self._groups.pop((record.table, record.split()[0]), None)

    def forget_page(self, page: Page) -> None:
        """A group was changed by somebody."""
        self._groups.pop((page.table, page.group), None)

    def clear(self) -> None:
        """Anything may have changed."""
        for values in self._values.values():
            values.clear()
        self._groups.clear()
        self._told.clear()

    def tell(self, dirents: Mapping[bytes, bytes | None]) -> None:
        """The feed, to its end, says of these what they are now; None: nothing is known of it. What
        was read since it was asked for is newer, and stays."""
        told, known = self._told, self._values[SharedTable.DIRENT]
        for key, value in dirents.items():
            if value is not None and key not in known:
                told[key] = value
        while len(told) > CLUSTER_NAMES_TOLD_MAX:
            told.popitem(last=False)

    def learn(self, commit: Commit) -> None:
        """A transaction of this node went through."""
        self.forget(commit.writes)
        for record, value in commit.writes.items():
            if record.table is not SharedTable.LOOSE:  # never asked for again
                self._keep(record, value)

    def _keep(self, record: Record, value: bytes | None) -> None:
        values = self._values[record.table]
        if value is None and record.table in KEPT_IF_THERE:
            values.pop(record.key, None)
            return
        if value is not None and record.table is SharedTable.DIRENT and not is_dirent(value):
            values.pop(record.key, None)  # `dirents` trusts what is here
            return
        values[record.key] = value
        if len(values) > CLUSTER_RECORDS_CACHED_MAX:
            values.popitem(last=False)
