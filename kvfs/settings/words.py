"""What a node is told: its directories, mount, cluster, tiers, and what comes ahead."""

from dataclasses import dataclass, field
from enum import StrEnum, unique
from pathlib import Path

from kvfs.settings.sizes import Share


@dataclass(frozen=True, slots=True)
class DirectoryConfig:
    """One local directory of a store and how much of its disk it may use.

    `max_bytes` None: all that `min_free` leaves. `min_free` None: 5% of the file system, at most
    1 GiB. A share counts from the file system's capacity.
    """

    path: Path
    max_bytes: int | Share | None = None
    min_free: int | Share | None = None


@dataclass(frozen=True, slots=True)
class MountConfig:
    """How the mount behaves."""

    allow_other: bool = False
    passthrough: bool = True  # where kernel, libfuse and pyfuse3 can
    symlink: bool = False  # published files show as links to their blobs
    read_ahead_kib: int = 1024
    flags: tuple[str, ...] = ()  # of mount(2), such as "ro"


@dataclass(frozen=True, slots=True)
class CopyRule:
    """Files whose paths from the root begin with `prefix` are to be on so many nodes."""

    prefix: bytes
    copies: int


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """How a node is one of many."""

    metadata: str  # URL of the server that holds the names
    name: str = "kvfs"  # of the cluster, where several share a server
    listen: str = ""  # `host:port` to serve peers at; empty: any port, where the server is reached
    bulk_port: int | None = None  # of the same address, for the bytes of files; see `bulk_port`
    insecure: bool = False  # serve peers without keys
    encrypt_bulk: bool = False  # also the bytes of files, at a tenth of the speed
    copy_after: int = 2  # reads by clients straight from another node; 0: never
    copies: tuple[CopyRule, ...] = ()  # the rule with the longest prefix counts; else one node


@unique
class TierKind(StrEnum):
    """What a tier is."""

    MEMORY = "memory"  # a directory on tmpfs
    NVME = "nvme"  # a directory on a local disk
    SHARED = "shared"  # a directory on a parallel or network file system
    PEER = "peer"  # another node
    OBJECT = "object"  # a bucket


@dataclass(frozen=True, slots=True)
class TierLimits:
    """What is asked of a tier at the same time, how long it may take, and what it costs."""

    reads_max: int
    writes_max: int
    read_deadline_s: float  # for the answer to one call, when its caller says nothing shorter
    write_deadline_s: float
    cost_per_request: float = 0.0  # in seconds that a job must gain by it
    cost_per_gib: float = 0.0  # the same, of what is read


TIER_LIMITS = {  # what a tier has when nobody says
    TierKind.MEMORY: TierLimits(4, 2, 2.0, 10.0),
    TierKind.NVME: TierLimits(8, 2, 10.0, 30.0),
    TierKind.SHARED: TierLimits(16, 4, 10.0, 60.0),
    TierKind.PEER: TierLimits(8, 1, 10.0, 10.0),
    TierKind.OBJECT: TierLimits(32, 4, 10.0, 60.0),
}


@dataclass(frozen=True, slots=True)
class TierConfig:
    """One `[[tiers]]` table: a directory (`path`), or a bucket (`url`). Other nodes are found."""

    name: str
    kind: TierKind
    limits: TierLimits
    path: Path | None = None
    min_free: int | Share | None = None  # of a directory's file system; None: as of a store's
    max_bytes: int | None = None  # above it this node evicts from the tier; None: never
    fsync: bool = False
    url: str = ""
    endpoint: str = ""  # of a server other than the provider's own
    region: str = ""


@dataclass(frozen=True, slots=True)
class TierRule:
    """To how many tiers files are copied whose paths from the root begin with `prefix`."""

    prefix: bytes
    copies: int  # `TIERS_MAX`: to all; 0: to none
    second_use: bool = False  # only once they are read after they were stored


@dataclass(frozen=True, slots=True)
class PrefetchConfig:
    """What a node brings to its store before it is asked for. What a person warms always comes."""

    expected: bool = True  # that requests which wait in an engine will read
    children: bool = True  # chunks that continue one that was just read
    successors: bool = True  # files that used to follow the one that was just read
    full_at: float = 0.9  # a share of the store, above which nothing is brought on a guess


@dataclass(frozen=True, slots=True)
class Config:
    """Everything a node is told. The first directory holds metadata, socket and log."""

    directories: tuple[DirectoryConfig, ...]
    fsync: bool = False
    idle_exit_s: float | None = None  # leave when no client was there for so long
    socket_mode: int = 0o600
    mount: MountConfig = field(default_factory=MountConfig)
    cluster: ClusterConfig | None = None  # None: a node for itself
    tiers: tuple[TierConfig, ...] = ()
    tier_rules: tuple[TierRule, ...] = ()  # the longest prefix counts; else to all tiers
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)

    @property
    def home(self) -> Path:
        return self.directories[0].path
