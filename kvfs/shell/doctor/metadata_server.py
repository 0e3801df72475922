"""The server that holds the names of a cluster: whether it takes this node's words, and whether it
keeps what it is given."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import quote

from kvfs.errors import InvalidInput, Unavailable
from kvfs.meta.url import Form, parse_url, without_password
from kvfs.shell.doctor.cluster import Joined
from kvfs.shell.doctor.deadline import within
from kvfs.shell.doctor.finding import Finding, Level
from kvfs.shell.doctor.software import parse_version
from kvfs.shell.render import size_text, snippet

if TYPE_CHECKING:
    from kvfs.meta.probe import Facts, Keeping, Memory

SERVER_DEADLINE_S = 6.0  # for all that is asked: as long as a node looks for it at its start, twice
ROUND_TRIP_GOOD_S = 0.05
FILL_GOOD = 0.9
VERSION_MIN = (7,)
_CHECK = "metadata server"
_SAID_CHARACTERS_MAX = 240
_WRITE_URL = "write its URL with the password into kvfs.toml: metadata_file, or metadata"
_NOT_SHOWN = "not shown to this user (INFO)"


def check_metadata_server(joined: Joined) -> Iterator[Finding]:
    """The server, as a node would find it now."""
    url, shown = joined.config.metadata, without_password(joined.config.metadata)
    if not joined.is_written and url.endswith("://..."):  # all that may be shown of some
        found = "which one it is was said with --join only"
        yield Finding(_CHECK, Level.WARN, found, _WRITE_URL)
        return
    try:
        from kvfs.meta.probe import look_at
    except ImportError as error:
        advice = "install what kvfs depends on: pip install redis"
        yield Finding(_CHECK, Level.FAIL, f"cannot be asked: {error}", advice)
        return
    try:
        facts = within(SERVER_DEADLINE_S, lambda: look_at(url, joined.config.name))
    except TimeoutError:
        advice = "look whether it hangs, and whether its name is resolved"
        found = f"{shown} does not answer within {SERVER_DEADLINE_S:g} s"
        yield Finding(_CHECK, Level.FAIL, found, advice)
    except InvalidInput as error:
        advice = "mend the URL, which docs/cluster.md describes"
        level = Level.FAIL
        if not joined.is_written:  # what the store remembers of it is for people
            level, advice = Level.WARN, _WRITE_URL
        yield Finding(_CHECK, level, _quoted(str(error), url), advice)
    except Unavailable as error:
        yield _unavailable(joined, shown, _quoted(str(error), url))
    else:
        yield from _say(facts, joined, shown)


def _unavailable(joined: Joined, shown: str, said: str) -> Finding:
    """Why it does not answer, or will not, and what to do."""
    level = Level.FAIL
    if "refuses user or password" in said or "refuse their user or password" in said:
        advice = "give user and password before the host: redis://user:password@host"
        if not joined.is_written:  # what --join had besides is nowhere
            level, advice = Level.WARN, _WRITE_URL
    elif "does not allow" in said:
        advice = f"give the user its rights, and the keys ~{{kvfs:{joined.config.name}}}:*"
    elif "certificate" in said:
        advice = (
            "name the authority (ssl_ca_certs), the host that the certificate is for, and where the"
            " server asks for it this node's own (ssl_certfile, ssl_keyfile)"
        )
    elif "protected mode" in said:
        advice = "give the server a password (requirepass, or a user), and the URL the same"
    elif "redis+cluster" in said:
        advice = "write that, with some of its servers"
    elif "Connection closed" in said or "reset by peer" in said:
        advice = "if it wants TLS write rediss://; else look at the server's log"
    else:
        advice = "start it, or mend the URL, or the network between"
        if shown.startswith("rediss"):
            advice += (
                "; if it does not speak TLS there write redis://, or the port at which it does"
            )
    return Finding(_CHECK, level, f"{shown}: {said}", advice)


def _say(facts: "Facts", joined: Joined, shown: str) -> Iterator[Finding]:
    name = f"{facts.program} {facts.version}".strip()
    trip = f"{facts.round_trip_s * 1000:.1f} ms"
    found = f"{shown} answers in {trip}: {name}"
    if facts.round_trip_s > ROUND_TRIP_GOOD_S:
        advice = "each open asks it: put it nearer, or give it a processor of its own"
        yield Finding(_CHECK, Level.WARN, found, advice)
    elif facts.version and parse_version(facts.version) < VERSION_MIN:
        advice = "kvfs is tested with version 7 and later"
        yield Finding(_CHECK, Level.WARN, found, advice)
    else:
        yield Finding(_CHECK, Level.OK, found)
    yield _check_changes(facts.refusal, joined)
    yield _check_names(facts.has_cluster, joined)
    if facts.memory is None or facts.keeping is None:
        advice = "see on the server that maxmemory-policy is noeviction; +info lets kvfs see it"
        yield Finding("metadata eviction", Level.OK, _NOT_SHOWN, advice)
        return
    yield _check_memory(facts.memory)
    yield _check_keeping(facts.keeping)


def _check_changes(refusal: str, joined: Joined) -> Finding:
    """Whether it would take a change."""
    check = "metadata changes"
    if not refusal:
        return Finding(check, Level.OK, "are taken")
    said = _quoted(refusal, joined.config.metadata)
    if "read only replica" in said.lower() or said.startswith("READONLY"):
        form = parse_url(joined.config.metadata).form
        advice = "name the primary"
        if form is Form.SERVER:
            advice += ", or the Sentinels that know it: redis+sentinel://host:26379/service"
    elif "permission" in said.lower():
        advice = (
            f"give the user ~{{kvfs:{joined.config.name}}}:* +@read +@write +@scripting"
            " +@connection +time (docs/cluster.md)"
        )
    elif said.startswith("MISCONF") or "MISCONF" in said:
        advice = "mend the server's disk: it takes no changes while it cannot save"
    elif "NOREPLICAS" in said:
        advice = "start its replicas, or lower min-replicas-to-write"
    else:
        advice = "look at the server's log"
    return Finding(check, Level.FAIL, f"refused: {said}", advice)


def _check_names(has_cluster: bool, joined: Joined) -> Finding:
    """Whether the cluster is there."""
    check, name = "metadata names", joined.config.name
    if has_cluster:
        return Finding(check, Level.OK, f"of the cluster {name} are there")
    if not joined.is_member:
        return Finding(check, Level.OK, f"none of a cluster {name}: the first node makes it")
    advice = "if it was emptied its nodes give them back; else mend host, database or name"
    return Finding(check, Level.WARN, f"none of the cluster {name} are there", advice)


def _check_memory(memory: "Memory") -> Finding:
    """Whether it would throw names away."""
    check = "metadata eviction"
    room = size_text(memory.bytes_max) if memory.bytes_max else "no limit"
    found = f"{memory.policy}; {size_text(memory.used_bytes)} used of {room}"
    if memory.policy != "noeviction":
        advice = "CONFIG SET maxmemory-policy noeviction, and in its configuration: it loses names"
        return Finding(check, Level.WARN, found, advice)
    if memory.bytes_max and memory.used_bytes > FILL_GOOD * memory.bytes_max:
        advice = "raise maxmemory: changes fail when it is full"
        return Finding(check, Level.WARN, found, advice)
    return Finding(check, Level.OK, found)


def _check_keeping(keeping: "Keeping") -> Finding:
    """Whether names outlive it."""
    check = "metadata on disk"
    ways = [
        word
        for has, word in ((keeping.has_log, "log"), (keeping.has_snapshots, "snapshots"))
        if has
    ]
    if keeping.replicas:
        ways.append("replicas")
    found = ", ".join(ways)
    if keeping.has_failed:
        advice = "look at the server's log, and whether its disk is full"
        return Finding(check, Level.WARN, "its last write to the disk failed", advice)
    if found:
        return Finding(check, Level.OK, found)
    if keeping.has_snapshots is None:
        return Finding(check, Level.OK, "no log; snapshots are not shown to this user (CONFIG)")
    advice = (
        "`appendonly yes` there: after its restart there are only names of files that running"
        " nodes have"
    )
    return Finding(check, Level.WARN, "neither log, snapshots nor replicas", advice)


def _quoted(said: str, url: str) -> str:
    """A server's words on one line, without a secret of the URL: it may say again what it was
    asked."""
    for secret in _secrets(url):
        said = said.replace(secret, "***")
    return snippet(said, _SAID_CHARACTERS_MAX)


def _secrets(url: str) -> list[str]:
    """What must not be shown, the longest first; of a text that is no URL what looks like it."""
    try:
        parts = parse_url(url)
    except InvalidInput:
        return sorted(re.findall(r":([^:@/]+)@", url), key=len, reverse=True)
    key_password = parts.tls.get("ssl_password")
    plain = [parts.password, parts.sentinel_password, key_password]
    secrets = [word for word in plain if isinstance(word, str) and word]
    return sorted({*secrets, *map(quote, secrets)}, key=len, reverse=True)
