"""Copies between the engine's blocks and a slot's payload.

On a CPU they are plain copies by the calling thread. On a CUDA device they run on a stream of the
calling thread beside the engine's own: ordered behind the engine's work by an event (`mark`), and
waited for by the host, so that whoever calls knows when the blocks may be reused.
"""

import threading
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from gpu_bridge.layout import GroupLayout, Region


class Mark(Protocol):
    """A point in the engine's work that copies come after."""

    def synchronize(self) -> None: ...


class Copier(Protocol):
    """Moves whole blocks. Both calls return when the bytes have arrived."""

    def mark(self) -> Mark | None:
        """What the engine has submitted so far; called by the engine's thread."""

    def gather(
        self,
        group: GroupLayout,
        block_ids: Sequence[int],
        payload: torch.Tensor,
        after: Mark | None,
    ) -> None:
        """Fill `payload` with the blocks, in their order."""

    def scatter(
        self,
        group: GroupLayout,
        block_ids: Sequence[int],
        rows: Sequence[int],
        blocks: int,
        payload: torch.Tensor,
        after: Mark | None,
    ) -> None:
        """Put row `rows[i]` of a payload of `blocks` blocks into block `block_ids[i]`."""


def copier_for(device: torch.device) -> Copier:
    return CudaCopier(device) if device.type == "cuda" else CpuCopier()


class CpuCopier:
    """numpy moves the rows: unlike torch it starts no team of threads, which would take the cores
    from the engine's. One call for all rows of a layer: each call may wait for the GIL."""

    def mark(self) -> Mark | None:
        return None  # the engine's work is done when its call returns

    def gather(
        self,
        group: GroupLayout,
        block_ids: Sequence[int],
        payload: torch.Tensor,
        after: Mark | None,
    ) -> None:
        run = _run_of(block_ids)
        for region in group.regions(len(block_ids)):
            source = region.rows.numpy()
            target = _rows_of(payload, region, len(block_ids)).numpy()
            if run is not None:
                target[:] = source[run]
            else:  # another mode than "clip" would go through a buffer; the ids are the engine's
                np.take(source, block_ids, axis=0, out=target, mode="clip")

    def scatter(
        self,
        group: GroupLayout,
        block_ids: Sequence[int],
        rows: Sequence[int],
        blocks: int,
        payload: torch.Tensor,
        after: Mark | None,
    ) -> None:
        run = _run_of(block_ids)
        targets = list(block_ids) if run is None else run
        for region in group.regions(blocks):
            source = _rows_of(payload, region, blocks).numpy()
            is_all = len(rows) == blocks  # then they are in order, and need no copy between
            region.rows.numpy()[targets] = source if is_all else source[list(rows)]


class CudaCopier:
    """One transfer over the bus for a whole payload, and a kernel for each layer that gathers or
    scatters its rows on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = threading.local()

    def mark(self) -> Mark | None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types here
        event.record(torch.cuda.current_stream(self._device))
        return event

    def gather(
        self,
        group: GroupLayout,
        block_ids: Sequence[int],
        payload: torch.Tensor,
        after: Mark | None,
    ) -> None:
        stream = self._stream_after(after)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            scratch = torch.empty_like(payload, device=self._device)
            gather_rows(group, self._indices(block_ids), scratch)
            payload.copy_(scratch, non_blocking=True)
        stream.synchronize()

    def scatter(
        self,
        group: GroupLayout,
        block_ids: Sequence[int],
        rows: Sequence[int],
        blocks: int,
        payload: torch.Tensor,
        after: Mark | None,
    ) -> None:
        stream = self._stream_after(after)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            scratch = payload.to(self._device, non_blocking=True)
            scatter_rows(group, self._indices(block_ids), self._indices(rows), blocks, scratch)
        stream.synchronize()

    def _stream_after(self, after: Mark | None) -> torch.cuda.Stream:
        stream: torch.cuda.Stream | None = getattr(self._own, "stream", None)
        if stream is None:
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # as above
            self._own.stream = stream
        if after is not None:
            assert isinstance(after, torch.cuda.Event)
            stream.wait_event(after)
        return stream

    def _indices(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


def gather_rows(group: GroupLayout, block_ids: torch.Tensor, payload: torch.Tensor) -> None:
    """Fill a payload on the blocks' own device."""
    for region in group.regions(len(block_ids)):
        source, target = _widened(region.rows, _rows_of(payload, region, len(block_ids)))
        torch.index_select(source, 0, block_ids, out=target)


def scatter_rows(
    group: GroupLayout,
    block_ids: torch.Tensor,
    rows: torch.Tensor,
    blocks: int,
    payload: torch.Tensor,
) -> None:
    """Empty a payload that lies on the blocks' own device."""
    for region in group.regions(blocks):
        target, source = _widened(region.rows, _rows_of(payload, region, blocks))
        target.index_copy_(0, block_ids, source.index_select(0, rows))


def _run_of(block_ids: Sequence[int]) -> slice | None:
    """Blocks that follow one another, as an engine often gives them: one plain copy."""
    first = block_ids[0]
    is_run = list(block_ids) == list(range(first, first + len(block_ids)))
    return slice(first, first + len(block_ids)) if is_run else None


def _rows_of(payload: torch.Tensor, region: Region, blocks: int) -> torch.Tensor:
    row_bytes = region.rows.shape[1]
    begin = region.offset_bytes
    return payload[begin : begin + blocks * row_bytes].view(blocks, row_bytes)


def _widened(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as the widest elements that fit: a device moves bytes one by one only slowly."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        size = dtype.itemsize
        if all(
            t.shape[1] % size == 0 and t.stride(0) % size == 0 and t.data_ptr() % size == 0
            for t in (first, second)
        ):
            return first.view(dtype), second.view(dtype)
    return first, second
