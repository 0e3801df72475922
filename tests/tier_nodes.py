"""Nodes with tiers, as tests configure, fill and watch them. A file is known by its number."""

from collections.abc import Sequence
from pathlib import Path

from kvfs.client import Client
from kvfs.config import MIB
from kvfs.digest import digest_of
from kvfs.meta.contract import Blob
from tests.files import store_bytes
from tests.processes import wait_until

STORE = 'max_bytes = "24MiB"\n'  # a configuration's


def tier(name: str, path: Path, kind: str = "shared", more: str = "") -> str:
    """The table of a tier that is a directory."""
    return f'[[tiers]]\nname = "{name}"\nkind = "{kind}"\npath = "{path}"\n{more}'


def data_of(number: int, size_bytes: int = MIB) -> bytes:
    return number.to_bytes(4, "little") * (size_bytes // 4)


def names_of(numbers: Sequence[int]) -> set[str]:
    """The blobs of files by their numbers, as a directory names them."""
    return {digest_of(data_of(number)).hex() for number in numbers}


def store_files(client: Client, files: dict[bytes, bytes]) -> None:
    for path, data in files.items():
        store_bytes(client, path, data)


def files_in(path: Path) -> set[str]:
    """The blobs that a tier's directory holds."""
    return {file.name for file in (path / "blobs").rglob("*") if file.is_file()}


def blobs_of(client: Client, count: int) -> list[Blob]:
    found = client.blobs([digest_of(data_of(number)) for number in range(count)])
    return [blob for blob in found if blob is not None]


def tiering_of(client: Client) -> dict[str, dict[str, object]]:
    tiering: dict[str, dict[str, object]] = client.status()["tiering"]
    return tiering


def wait_copied(client: Client) -> None:
    """Until every file has the copies that it is to have."""
    wait_until(lambda: tiering_of(client)["behind"]["waiting"] == 0)
