"""`kvfs show`: everything about one file."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvfs.chunk import DTYPE_BYTES, ChunkHeader, TensorSpec, payload_bytes
from kvfs.client import Client
from kvfs.errors import Corrupt
from kvfs.inspect import FileFacts, describe
from kvfs.names import escape
from kvfs.replicate import Holder, HolderState
from kvfs.shell.render import count_text, facts, mode_text, size_text, table, write_json
from kvfs.shell.session import Session, inode_document
from kvfs.stored import read_header

SAME_BYTES_SHOWN = 10


def look_at_header(client: Client, path: bytes) -> ChunkHeader | None:
    """The header of a chunk file; None when the file is gone or no chunk. Looking is no use."""
    (file,) = client.open([path], is_use=False)
    if file is None:
        return None
    with file:
        try:
            return read_header(file.fd, file.size_bytes)
        except Corrupt:
            return None


def show(session: Session, word: str) -> int:
    """`kvfs show PATH|DIGEST`."""
    found = describe(session.client, session.place.paths[0], word)
    # Of a file that only other nodes have, a look must not bring the bytes here.
    header = look_at_header(session.client, found.path) if found.blob is not None else None
    directories = session.client.status()["directories"]
    place = None
    if found.blob is not None and found.blob.directory < len(directories):
        place = directories[found.blob.directory].get("path")
    places = Elsewhere(_find_holders(session.client, found), _find_tiers(session.client, found))
    if session.is_json:
        write_json(session.out, _document(found, header, place, places))
    else:
        session.lines(_lines(session, found, header, place, places))
    return 0


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The nodes and the tiers that have a file; None of what there is none of."""

    holders: Sequence[Holder] | None
    tiers: Sequence[str] | None  # by their names


def _find_tiers(client: Client, found: FileFacts) -> list[str] | None:
    if not found.inode.is_published:
        return None
    tiers = client.tiers_of([found.inode.digest])
    return None if tiers is None else tiers[0]


def _find_holders(client: Client, found: FileFacts) -> list[Holder] | None:
    """Where copies lie: here first, then where they are within reach. None outside a cluster."""
    if not found.inode.is_published:
        return None
    copies = client.copies([found.inode.digest])
    if copies is None:
        return None
    order = list(HolderState)
    return sorted(copies[0], key=lambda h: (not h.is_this, order.index(h.state), h.host, h.address))


def _holder_line(holder: Holder) -> str:
    if holder.is_this:
        where = "this node"
    elif holder.host or holder.address:
        where = f"{holder.host}:{holder.store} at {holder.address}"
    else:
        where = "a node that is not there"
    leaving = ", leaving" if holder.state is HolderState.LEAVING else ""
    return f"{where}{leaving} (id {holder.node_id.hex()})"


def _holder_document(holder: Holder) -> dict[str, Any]:
    return {
        "node": holder.node_id.hex(),
        "state": holder.state.value,
        "is_this": holder.is_this,
        "host": holder.host or None,
        "address": holder.address or None,
        "store": holder.store or None,
    }


def _blob_file(found: FileFacts, place: str) -> str:
    name = found.inode.digest.hex()
    return os.path.join(place, "blobs", name[:2], name[2:4], name)


def _document(
    found: FileFacts,
    header: ChunkHeader | None,
    place: str | None,
    elsewhere: Elsewhere,
) -> dict[str, Any]:
    blob, info = found.blob, found.chunk
    return {
        **inode_document(found.path, found.inode),
        "blob": blob
        and {
            "directory": place,
            "file": place and _blob_file(found, place),
            "size_bytes": blob.size_bytes,
            "allocated_bytes": blob.allocated_bytes,
            "references": blob.references,
        },
        "copies": elsewhere.holders and [_holder_document(h) for h in elsewhere.holders],
        "tiers": elsewhere.tiers,
        "same_bytes": ["/" + escape(path) for path in found.same_bytes],
        "chunk": info
        and {
            "key": escape(info.key),
            "parent": escape(info.parent) or None,
            "token_start": info.token_start,
            "token_end": info.token_end,
            "group": info.group,
            "shard": info.shard,
            "tokens_digest": info.tokens_digest.hex() or None,
        },
        "header": header and _header_document(header),
    }


def _header_document(header: ChunkHeader) -> dict[str, Any]:
    return {
        "model": header.model,
        "fingerprint": header.fingerprint,
        "engine": header.engine,
        "payload_digest": header.digest.hex(),
        "payload_bytes": payload_bytes(header),
        "tokens_stored": header.token_ids is not None,
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "size_bytes": _tensor_bytes(tensor),
            }
            for tensor in header.tensors
        ],
    }


def _tensor_bytes(tensor: TensorSpec) -> int:
    return math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]


def _lines(
    session: Session,
    found: FileFacts,
    header: ChunkHeader | None,
    place: str | None,
    elsewhere: Elsewhere,
) -> Iterator[str]:
    inode, blob, info = found.inode, found.blob, found.chunk
    pairs = [
        ("path", "/" + escape(found.path)),
        ("type", inode_document(found.path, inode)["type"]),
        ("mode", f"{mode_text(inode.mode)}, owner {inode.uid}:{inode.gid}"),
        ("inode", f"{inode.ino}, {count_text(inode.nlink, 'name')}"),
        ("size", f"{size_text(inode.size_bytes)} ({inode.size_bytes:,} bytes)"),
        ("modified", session.ago(inode.mtime_ns)),
        ("last used", session.ago(inode.used_ns)),
        ("pinned", "yes" if inode.pinned else "no"),
    ]
    if inode.target:
        pairs.append(("points to", escape(inode.target)))
    if inode.is_regular:
        pairs.append(("digest", inode.digest.hex() or "none: still being written"))
    if blob is not None:
        where = "a directory that is missing" if place is None else _blob_file(found, place)
        pairs.append(("blob", escape(os.fsencode(where))))
        pairs.append(("on disk", size_text(blob.allocated_bytes)))
    elif elsewhere.holders is not None or elsewhere.tiers is not None:
        pairs.append(("blob", "not on this node"))
    for holder in elsewhere.holders or ():
        pairs.append(("copy", escape(os.fsencode(_holder_line(holder)))))
    pairs += [("tier", name) for name in elsewhere.tiers or ()]
    for path in found.same_bytes[:SAME_BYTES_SHOWN]:
        pairs.append(("same bytes", "/" + escape(path)))
    if len(found.same_bytes) > SAME_BYTES_SHOWN:
        pairs.append(("same bytes", f"and {len(found.same_bytes) - SAME_BYTES_SHOWN} more"))
    if info is not None:
        pairs += [
            ("chunk", f"tokens {info.token_start}-{info.token_end}"),
            ("group, shard", f"{info.group}, {info.shard}"),
            ("key", escape(info.key)),
            ("parent", escape(info.parent) or "none: starts a prompt"),
        ]
    if header is not None:
        pairs += [
            ("model", f"{escape(header.model.encode())}, fingerprint {header.fingerprint}"),
            ("engine", header.engine),
            ("token ids", "stored" if header.token_ids is not None else "not stored"),
            ("payload", f"{size_text(payload_bytes(header))}, digest {header.digest.hex()}"),
        ]
    yield from facts(pairs)
    if header is not None and header.tensors:
        yield ""
        yield from table(
            [["tensor", "dtype", "shape", "size"]]
            + [
                [
                    escape(t.name.encode()),
                    t.dtype,
                    "x".join(map(str, t.shape)) or "scalar",
                    size_text(_tensor_bytes(t)),
                ]
                for t in header.tensors
            ],
            right=(3,),
        )
