"""The `[cluster]` of a configuration: what a person may write there, and what it means."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvfs.config import CLUSTER_NODES_MAX, COPY_RULES_MAX, PATH_BYTES_MAX
from kvfs.errors import InvalidInput
from kvfs.meta.url import parse_url
from kvfs.peers.address import PORT_MAX, parse_address
from kvfs.settings.file import read_words
from kvfs.settings.keys import CLUSTER_KEYS, parse_count, parse_switch, refuse_unknown
from kvfs.settings.words import ClusterConfig, CopyRule

_RULES = "cluster.copies"

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


def parse_copy_rules(value: object) -> tuple[CopyRule, ...]:
    """The `[[cluster.copies]]` of a configuration. Raises `InvalidInput`."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise InvalidInput(_RULES, "is no list of tables; write [[cluster.copies]] above each rule")
    if len(value) > COPY_RULES_MAX:
        raise InvalidInput(_RULES, f"are {len(value)} rules; {COPY_RULES_MAX} are the limit")
    rules = tuple(_parse_copy_rule(item) for item in value)
    prefixes = [rule.prefix for rule in rules]
    for prefix in prefixes:
        if prefixes.count(prefix) > 1:
            shown = prefix.decode(errors="replace")
            raise InvalidInput(f"{_RULES}.prefix", f"{shown!r:.80} is named twice; name it once")
    return rules


def _parse_copy_rule(table: Mapping[str, Any]) -> CopyRule:
    for key in table:
        if key not in ("prefix", "copies"):
            raise InvalidInput(f"{_RULES}.{key}", "unknown key; known are copies, prefix")
    prefix, copies = table.get("prefix"), table.get("copies")
    if not isinstance(prefix, str):
        raise InvalidInput(f"{_RULES}.prefix", "is missing or no text; write how the paths begin")
    packed = prefix.encode().lstrip(b"/")
    if len(packed) > PATH_BYTES_MAX or b"\0" in packed:
        raise InvalidInput(f"{_RULES}.prefix", f"{prefix!r:.80} begins no path")
    if type(copies) is not int or not 1 <= copies <= CLUSTER_NODES_MAX:
        shown = "nothing" if copies is None else f"{copies!r:.80}"
        raise InvalidInput(
            f"{_RULES}.copies", f"{shown} is no number of nodes from 1 to {CLUSTER_NODES_MAX}"
        )
    return CopyRule(packed, copies)
