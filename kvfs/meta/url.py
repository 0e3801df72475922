"""The URL of a metadata server: one server, a service that Sentinels watch, or a Redis cluster.

    redis://[user:password@]host[:6379][/database]
    unix://[user:password@]/path/of/socket
    redis+sentinel://[user:password@]host[:26379],host...,/service[/database]
    redis+cluster://[user:password@]host[:6379],host...

With `rediss` for TLS; options behind `?`, as `OPTIONS` says. Only those: an option of the client
that sets a time would undo the bound on every wait.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import parse_qsl, unquote

from kvfs.config import CLUSTER_SERVERS_MAX
from kvfs.errors import InvalidInput

OPTIONS = {
    "db": "the database's number",
    "ssl_ca_certs": "file of the authority that signed the server's certificate",
    "ssl_certfile": "file of this node's own certificate",
    "ssl_keyfile": "file of its key",
    "ssl_password": "of that key",
    "ssl_check_hostname": "true or false: whether the certificate must name the host",
    "ssl_cert_reqs": "required or none: whether the certificate is checked",
    "sentinel_username": "who this node is to the Sentinels",
    "sentinel_password": "and its password there",
}
EXAMPLE = "write redis://host:6379"
_SCHEME = re.compile(r"(?P<kind>rediss?)(?:\+(?P<form>sentinel|cluster))?")
# As RFC 3986 takes one apart (appendix B). What several Pythons make of several hosts differs.
_PARTS = re.compile(r"(?:([^:/?#]+):)?(?://([^/?#]*))?([^?#]*)(?:\?([^#]*))?(?:#(.*))?", re.DOTALL)
_HOST = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.%]+)\]|(?P<host>[0-9A-Za-z._-]+))(?::(?P<port>\d+))?")
_PORTS = {"server": 6379, "sentinel": 26379, "cluster": 6379}
_SWITCH = {"true": True, "false": False}


class Form(Enum):
    """How the server is found that takes this node's words."""

    SERVER = "server"
    SOCKET = "socket"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """A URL, taken apart."""

    form: Form
    hosts: tuple[tuple[str, int], ...]  # of the server, the Sentinels, or nodes of the cluster
    path: str = ""  # of a socket
    service: str = ""  # as Sentinels name it
    database: int = 0
    user: str | None = None
    password: str | None = None
    is_tls: bool = False
    tls: Mapping[str, str | bool] = field(default_factory=dict)  # as the client names its options
    sentinel_user: str | None = None
    sentinel_password: str | None = None


def parse_url(url: str, subject: str = "metadata URL") -> ServerUrl:
    """Raises `InvalidInput`, about `subject`, without a password in it."""
    try:
        return _parse(url)
    except ValueError as error:
        shown = without_password(url)
        raise InvalidInput(subject, f"{shown!r:.80}: {error}; {EXAMPLE}") from error


def without_password(url: str) -> str:
    """The URL as it may be shown, also one that is none."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url
    address, question, options = rest.partition("?")
    if "@" in options and "@" not in address:
        return f"{scheme}://..."  # a password with a question mark, or one of an option
    kept = [part for part in options.split("&") if "password" not in part.partition("=")[0]]
    shown = f"{scheme}://{address.rpartition('@')[2]}"
    return shown + (question + "&".join(kept) if any(kept) else "")


def _parse(url: str) -> ServerUrl:
    found = _PARTS.fullmatch(url)
    assert found is not None  # of any text
    scheme, authority, path, query, fragment = (found[n] or "" for n in range(1, 6))
    scheme = scheme.lower()
    options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    unknown = sorted(options.keys() - OPTIONS.keys())
    if unknown:
        raise ValueError(f"unknown option {unknown[0]!r:.40}; known are {', '.join(OPTIONS)}")
    if fragment:
        raise ValueError("a # in a password is written %23")
    who, _, places = authority.rpartition("@")
    user, _, password = (unquote(part) for part in who.partition(":"))
    if scheme == "unix":
        if not path or places:
            raise ValueError("a socket is unix:///path")
        _refuse(options, "ssl_", "sentinel_")
        number = _number(options.get("db", ""))
        socket = unquote(path)
        return ServerUrl(Form.SOCKET, (), socket, "", number, user or None, password or None)
    match = _SCHEME.fullmatch(scheme)
    if match is None:
        raise ValueError("is no such URL")
    form = Form(match["form"] or "server")
    is_tls = match["kind"] == "rediss"
    if not is_tls:
        _refuse(options, "ssl_")
    if form is not Form.SENTINEL:
        _refuse(options, "sentinel_")
    segments = [unquote(segment) for segment in path.split("/")[1:] if segment]
    service = segments.pop(0) if form is Form.SENTINEL and segments else ""
    if form is Form.SENTINEL and not service:
        raise ValueError("Sentinels want a service's name: redis+sentinel://host:26379/service")
    if len(segments) > 1 or (segments and form is Form.CLUSTER):
        raise ValueError("there is too much behind the host")
    database = _number(options.get("db", segments[0] if segments else ""))
    if database and form is Form.CLUSTER:
        raise ValueError("a cluster has no databases")
    return ServerUrl(
        form,
        _hosts(places, form),
        service=service,
        database=database,
        user=user or None,
        password=password or None,
        is_tls=is_tls,
        tls=_tls(options),
        sentinel_user=options.get("sentinel_username"),
        sentinel_password=options.get("sentinel_password"),
    )


def _hosts(places: str, form: Form) -> tuple[tuple[str, int], ...]:
    named = [place for place in places.split(",") if place]
    if not named:
        raise ValueError("names no host")
    most = 1 if form is Form.SERVER else CLUSTER_SERVERS_MAX
    if len(named) > most:
        raise ValueError(f"names {len(named)} hosts, and {most} may be")
    found = []
    for place in named:
        match = _HOST.fullmatch(place)
        port = int(match["port"] or _PORTS[form.value]) if match else 0
        if match is None or not 0 < port < 65_536:
            raise ValueError(f"{place!r:.60} is no host:port")
        found.append((match["six"] or match["host"], port))
    return tuple(found)


def _tls(options: Mapping[str, str]) -> dict[str, str | bool]:
    found: dict[str, str | bool] = {k: v for k, v in options.items() if k.startswith("ssl_")}
    checked = options.get("ssl_cert_reqs", "required")
    if checked not in ("required", "none"):
        raise ValueError("ssl_cert_reqs is required or none")
    named = options.get("ssl_check_hostname", "true" if checked == "required" else "false")
    if named not in _SWITCH:
        raise ValueError("ssl_check_hostname is true or false")
    if _SWITCH[named] and checked == "none":
        raise ValueError("a certificate that is not checked cannot be for a host")
    found["ssl_check_hostname"] = _SWITCH[named]
    if ("ssl_certfile" in found) != ("ssl_keyfile" in found):
        raise ValueError("ssl_certfile and ssl_keyfile go together")
    return found


def _number(text: str) -> int:
    if text and not (text.isascii() and text.isdigit() and len(text) < 7):
        raise ValueError(f"{text!r:.40} is no database's number")
    return int(text or 0)


def _refuse(options: Mapping[str, str], *beginnings: str) -> None:
    for key in options:
        if key.startswith(beginnings):
            what = "rediss://" if key.startswith("ssl_") else "redis+sentinel://"
            raise ValueError(f"{key} is for {what}")
