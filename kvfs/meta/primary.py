"""Where the metadata server is: the one place that may be asked, found anew after it was lost.

Sentinels and clusters say which of their servers is the primary now, and names of hosts are
resolved. Both may hang, so it is done in a thread of its own, whose end is waited for within
bounds. What is asked goes over a `Link`, which forgets its connection with the first error: the
next question finds the primary anew.
"""

import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from socket import AF_UNSPEC, SOCK_STREAM, getaddrinfo
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, NoPermissionError, TryAgainError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from kvfs.config import CLUSTER_DEADLINE_S, CLUSTER_FIRST_SEARCH_S, CLUSTER_SERVERS_MAX
from kvfs.errors import InvalidInput, Unavailable
from kvfs.meta.url import Form, ServerUrl, parse_url

_Answer = TypeVar("_Answer")
_Place = tuple[str, int]


class Refused(Unavailable):
    """The server answers, and will not have this node: somebody must change something."""


class Unwilling(Unavailable):
    """The server answers, and does not do what it is asked for now."""


# How its refusals begin, and what to do. Those whose word the client's library takes away are told
# by its classes.
_REFUSALS: tuple[tuple[str, type[Exception] | None, str], ...] = (
    ("READONLY", redis.exceptions.ReadOnlyError, "it is a replica: name its primary"),
    ("OOM", redis.exceptions.OutOfMemoryError, "raise its maxmemory, or remove files"),
    ("LOADING", redis.exceptions.BusyLoadingError, "it reads its own file: wait"),
    ("MASTERDOWN", redis.exceptions.MasterDownError, "its primary is gone: start that"),
    ("CLUSTERDOWN", redis.exceptions.ClusterDownError, "start its other servers"),
    ("NOREPLICAS", None, "start its replicas, or lower min-replicas-to-write"),
    ("BUSY", None, "somebody's script keeps it: SCRIPT KILL ends that"),
    ("MISCONF", None, "it cannot save: see its log and its disk"),
)


class _Search:
    """A look for the primary, in a thread of its own. Once it is over, it has one of the two."""

    def __init__(self, find: Callable[[], _Place]) -> None:
        self._find = find
        self.is_over = threading.Event()
        self.place: _Place | None = None
        self.error: Exception | None = None
        threading.Thread(target=self._run, name="kvfs-primary", daemon=True).start()

    def _run(self) -> None:
        try:
            self.place = self._find()
        except (redis.RedisError, OSError, ValueError) as error:
            self.error = error
        finally:
            self.is_over.set()


class Primary:
    """What all links of one node know of the place. Thread-safe."""

    def __init__(self, url: str, key: bytes) -> None:
        """`key`: one of those that all lie in one slot. Raises `InvalidInput`."""
        self.url = parse_url(url)
        _check_tls(self.url)
        self._slot = key_slot(key)
        self._lock = threading.Lock()
        self._place: _Place | None = None
        self._search: _Search | None = None
        self._nodes = list(
            self.url.hosts
        )  # of a cluster, or Sentinels; those to ask first in front
        self._patience_s = CLUSTER_FIRST_SEARCH_S  # until it was found once: nobody is served yet

    def place(self) -> _Place:
        """Where the primary is. Waits for `CLUSTER_DEADLINE_S` at most, for longer at the start.
        Raises `Unavailable`."""
        with self._lock:
            if self._place is not None:
                return self._place
            if self._search is None:
                self._search = _Search(self._find)
            search = self._search
        if not search.is_over.wait(self._patience_s):
            raise Unavailable("the metadata server is still looked for")
        with self._lock:
            if self._search is search:
                self._search, self._place = None, search.place
        if search.place is None:
            assert search.error is not None
            raise _unavailable(search.error, self.url) from search.error
        self._patience_s = CLUSTER_DEADLINE_S
        return search.place

    def lost(self, place: _Place, moved_to: _Place | None = None) -> None:
        """The primary is not there, or not any more; perhaps somebody said where it is."""
        with self._lock:
            if self._place == place:
                self._place = moved_to

    def client(
        self, place: _Place, timeout_s: float, connect_s: float = CLUSTER_DEADLINE_S
    ) -> "redis.Redis":
        """A client of the server at a place. Connects when it is first asked."""
        url = self.url
        options: dict[str, Any] = {"username": url.user, "password": url.password}
        if url.form is Form.SOCKET:
            options["unix_socket_path"] = url.path
        else:
            options["host"], options["port"] = place
        return redis.Redis(
            db=url.database,
            **options,
            **self._options(timeout_s, connect_s),
        )

    def _options(self, timeout_s: float, connect_s: float) -> dict[str, Any]:
        options: dict[str, Any] = {
            "socket_timeout": timeout_s,
            "socket_connect_timeout": connect_s,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        return options | ({"ssl": True, **self.url.tls} if self.url.is_tls else {})

    # Finding it, in a thread of its own ----------------------------------------------------------
    def _find(self) -> _Place:
        form = self.url.form
        if form is Form.SOCKET:
            return self.url.path, 0
        if form is Form.SENTINEL:
            place = self._ask_sentinels()
        elif form is Form.CLUSTER:
            place = self._ask_nodes()
        else:
            [place] = self.url.hosts
        if not _is_numeric(place[0]):
            getaddrinfo(*place, AF_UNSPEC, SOCK_STREAM)  # so that the client's own will not hang
        return place

    def _ask_sentinels(self) -> _Place:
        hosts = list(self._nodes)
        # Who was asked first may be cut off from the others: another one the next time.
        self._nodes.append(self._nodes.pop(0))
        who = {"username": self.url.sentinel_user, "password": self.url.sentinel_password}
        each_s = self._patience_s / len(hosts)
        sentinel = Sentinel(  # type: ignore[no-untyped-call]  # theirs has no types
            hosts, sentinel_kwargs=who | self._options(each_s, each_s)
        )
        try:
            host, port = sentinel.discover_master(self.url.service)  # type: ignore[no-untyped-call]
        finally:
            for asked in sentinel.sentinels:
                asked.close()
        return str(host), int(port)

    def _ask_nodes(self) -> _Place:
        errors = []
        asked = list(self._nodes)
        each_s = self._patience_s / len(asked)
        for node in asked:
            self._nodes.append(self._nodes.pop(0))
            try:
                with self.client(node, each_s, each_s) as client:
                    ranges = client.cluster("SLOTS")
            except redis.AuthenticationError:
                raise
            except redis.RedisError as error:
                errors.append(f"{node[0]}:{node[1]}: {error}")
                continue
            found = self._read_slots(ranges, node)
            if found is not None:
                return found
            errors.append(f"{node[0]}:{node[1]}: nobody has slot {self._slot}")
        raise redis.ConnectionError("; ".join(errors))

    def _read_slots(self, ranges: list[Any], asked: _Place) -> _Place | None:
        """The primary of this node's slot; all servers that have it are remembered. A server that
        does not know its own address is where it was asked."""
        for first, last, *servers in ranges:
            if first <= self._slot <= last:
                places = [(_text(server[0]) or asked[0], int(server[1])) for server in servers]
                others = dict.fromkeys(p for p in (*places[1:], *self._nodes) if p != places[0])
                # When the primary is lost, it is the last one to say who is it now.
                self._nodes = [*others][: CLUSTER_SERVERS_MAX - 1] + places[:1]
                return places[0]
        return None


def _text(host: bytes | None) -> str:
    return "" if host is None else host.decode("ascii", "replace")


@dataclass(slots=True)
class _Open:
    place: _Place
    client: "redis.Redis"


class Link:
    """A way to the primary with a bound of its own on each answer. Thread-safe."""

    def __init__(self, primary: Primary, timeout_s: float) -> None:
        self._primary = primary
        self._timeout_s = timeout_s
        self._open: _Open | None = None

    def ask(self, question: "Callable[[redis.Redis], _Answer]", tries: int = 1) -> _Answer:
        """Ask the primary; once more where a server says that another one is it. Raises
        `Unavailable`, as `Refused` where the server is there and will not."""
        try:
            return self._ask(question)
        except _Moved:
            return self._ask(question)
        except Refused:
            raise
        except Unavailable:
            if tries == 1:
                raise
            return self.ask(question, tries - 1)

    def _ask(self, question: "Callable[[redis.Redis], _Answer]") -> _Answer:
        open_ = self._connect()
        try:
            return question(open_.client)
        except redis.RedisError as error:
            if isinstance(error, MovedError) and self._primary.url.form is Form.CLUSTER:
                self._drop(open_, (error.host or open_.place[0], error.port))
                raise _Moved("another server of the cluster has this node's slot now") from error
            self._drop(open_, None)
            raise _unavailable(error, self._primary.url) from error

    def _connect(self) -> _Open:
        place = self._primary.place()
        open_ = self._open
        if open_ is None or open_.place != place:
            self._open = open_ = _Open(place, self._primary.client(place, self._timeout_s))
        return open_

    def _drop(self, open_: _Open, moved_to: _Place | None) -> None:
        if self._open is open_:
            self._open = None
        # Another thread's question may be on its way: its connection closes behind it.
        open_.client.connection_pool.disconnect(inuse_connections=False)
        self._primary.lost(open_.place, moved_to)

    def close(self) -> None:
        open_, self._open = self._open, None
        if open_ is not None:
            open_.client.close()


class _Moved(Unavailable):
    """Another server of the cluster is asked for this; nothing was done."""


def _unavailable(error: Exception, url: ServerUrl) -> Unavailable:
    """What an error of the client means."""
    text = str(error)
    if isinstance(error, MasterNotFoundError):
        if "AuthenticationError" in text:
            return Refused("the Sentinels refuse their user or password (sentinel_password)")
        return Unavailable(f"no Sentinel knows a primary of {url.service!r} that is there: {text}")
    if isinstance(error, redis.AuthenticationError):
        return Refused(f"the metadata server refuses user or password: {text}")
    if isinstance(error, NoPermissionError):
        return Refused(f"the metadata server does not allow this user enough: {text}")
    if isinstance(error, MovedError) and url.form is not Form.CLUSTER:
        return Refused("the metadata server is one of a cluster: write redis+cluster://host:6379")
    if isinstance(error, AskError | TryAgainError):
        return Unavailable(f"the metadata server's slot is being moved to another one: {text}")
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return Refused(
                f"the metadata server's certificate is not trusted: {cause.verify_message};"
                " name its authority's file with ?ssl_ca_certs="
            )
        cause = cause.__cause__ or cause.__context__
    for word, kind, advice in _REFUSALS:
        if text.startswith(word + " ") or (kind is not None and isinstance(error, kind)):
            return Unwilling(f"the metadata server refuses: {_said(text)}; {advice}")
    if isinstance(error, redis.ResponseError):
        return Unwilling(f"the metadata server refuses: {_said(text)}; see its log")
    return Unavailable(f"the metadata server does not answer: {text}")


def _said(text: str) -> str:
    """A refusal without which script met it."""
    return text.partition(" script: ")[0].rstrip(".")


def _check_tls(url: ServerUrl) -> None:
    """Have bad files found before anybody waits for a server. Raises `InvalidInput`."""
    if not url.is_tls:
        return
    options = {key: value for key, value in url.tls.items() if isinstance(value, str)}
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        try:
            if name in options:
                with open(options[name], "rb") as file:
                    file.read(1)
        except OSError as error:
            raise InvalidInput("metadata URL", f"{name}: {error}") from error
    context = ssl.create_default_context()
    try:
        if "ssl_ca_certs" in options:
            context.load_verify_locations(options["ssl_ca_certs"])
        if "ssl_certfile" in options:
            password = options.get("ssl_password", "")
            context.load_cert_chain(options["ssl_certfile"], options["ssl_keyfile"], password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise InvalidInput("metadata URL", f"its certificates cannot be used: {error}") from error


def _is_numeric(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
