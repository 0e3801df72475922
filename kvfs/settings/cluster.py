"""The `[cluster]` of a configuration: what a person may write there, and what it means."""

import re
from dataclasses import replace
from pathlib import Path

from kvfs.errors import InvalidInput
from kvfs.meta.url import parse_url
from kvfs.peers.address import PORT_MAX, parse_address
from kvfs.settings.file import read_words
from kvfs.settings.keys import CLUSTER_KEYS, parse_count, parse_switch, refuse_unknown
from kvfs.settings.rules import parse_copy_rules
from kvfs.settings.words import ClusterConfig

_CLUSTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def parse_cluster(table: object) -> ClusterConfig:
    """Check the table and give it types. Raises `InvalidInput`."""
    if not isinstance(table, dict):
        raise InvalidInput("cluster", "is no table; write [cluster]")
    refuse_unknown(table, CLUSTER_KEYS, "cluster.")
    for key in ("metadata", "metadata_file", "name", "listen"):
        if not isinstance(table.get(key, ""), str):
            raise InvalidInput(f"cluster.{key}", f"{table[key]!r:.80} is no text")
    url, key = table.get("metadata", ""), "cluster.metadata"
    if "metadata_file" in table:
        if "metadata" in table:
            raise InvalidInput("cluster.metadata_file", "is written beside metadata; write one")
        url, key = _read_url(Path(table["metadata_file"])), "cluster.metadata_file"
    return join_cluster(
        ClusterConfig(
            url,
            table.get("name", "kvfs"),
            table.get("listen", ""),
            _parse_port(table["bulk_port"], "cluster.bulk_port") if "bulk_port" in table else None,
            parse_switch(table, "insecure", "cluster."),
            parse_switch(table, "encrypt_bulk", "cluster."),
            parse_count(table.get("copy_after", 2), "cluster.copy_after"),
            parse_copy_rules(table.get("copies", [])),
        ),
        url,
        key,
    )


def _read_url(file: Path) -> str:
    """A URL with a password in it, which others may read neither in a configuration nor in a list
    of processes: the only line of a file."""
    try:
        return read_words(file).decode("utf-8").strip()
    except OSError as error:
        reason = f"{file} cannot be read: {error.strerror}"
        raise InvalidInput("cluster.metadata_file", reason) from error
    except ValueError as error:
        raise InvalidInput("cluster.metadata_file", f"{file} is no text: {error}") from error


def join_cluster(cluster: ClusterConfig | None, url: str, key: str) -> ClusterConfig:
    """A cluster's configuration with this URL of its metadata. Raises `InvalidInput`."""
    if not url:
        raise InvalidInput(key, "is missing; write where the names are: redis://host:6379")
    cluster = replace(cluster or ClusterConfig(url), metadata=url)
    parse_url(url, key)
    if _CLUSTER_NAME.fullmatch(cluster.name) is None:
        raise InvalidInput(
            "cluster.name",
            f"{cluster.name!r:.80} must begin with a letter or digit, and have those and ._- only",
        )
    if cluster.listen and not parse_address(cluster.listen).is_numeric:
        raise InvalidInput(
            "cluster.listen", f"{cluster.listen!r:.80} must have an IP address, as 10.0.0.7:7400"
        )
    if cluster.listen:
        port = parse_address(cluster.listen).port
        if port and cluster.bulk_port == port:
            raise InvalidInput("cluster.bulk_port", "is the port of listen; write another one")
        if port == PORT_MAX and cluster.bulk_port is None:
            raise InvalidInput(
                "cluster.listen", "is the last port, and bytes go by the next one; write bulk_port"
            )
    if cluster.insecure and cluster.encrypt_bulk:
        raise InvalidInput("cluster.encrypt_bulk", "needs keys; take insecure = true away")
    return cluster


def _parse_port(value: object, key: str) -> int:
    if type(value) is not int or not 0 <= value <= PORT_MAX:
        raise InvalidInput(key, f"{value!r:.80} is no port from 0 (any) to {PORT_MAX}")
    return value
