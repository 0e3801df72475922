"""The engine's KV tensors as rows of bytes: one row is what one block holds of one layer.

A block is opaque: its bytes are moved, never understood. What counts is where they lie. A layer's
tensor has the blocks in one dimension. Those dimensions that are dense in memory inside a block (in
any order) make a row; all others (keys and values apart, heads before blocks or with other layers
between them) split the layer into several row views. Layers may share storage, within a group and
over groups.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvfs.chunk import DTYPE_BYTES, TensorSpec
from kvfs.errors import InvalidInput

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
}


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """One layer: `rows` are uint8 views of shape [num_blocks, row_bytes], one for each combination
    of the dimensions outside a block (`outer`, in memory order); `inner` is a block's shape in
    memory order."""

    name: str
    dtype: str
    outer: tuple[int, ...]
    inner: tuple[int, ...]
    rows: tuple[torch.Tensor, ...]

    @property
    def row_bytes(self) -> int:
        return self.rows[0].shape[1]

    def spec(self, blocks: int) -> TensorSpec:
        """How the layer's part of a chunk is described in its header."""
        return TensorSpec(self.name, self.dtype, (*self.outer, blocks, *self.inner))


@dataclass(frozen=True, slots=True)
class Region:
    """Where the rows of one view lie in a chunk's payload: `blocks` rows from `offset_bytes` on."""

    rows: torch.Tensor
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """All layers of one KV group, in the order in which they lie in a chunk's payload."""

    index: int
    layers: tuple[LayerLayout, ...]

    @property
    def block_bytes(self) -> int:
        """What one block holds of all layers."""
        return sum(layer.row_bytes * len(layer.rows) for layer in self.layers)

    def specs(self, blocks: int) -> tuple[TensorSpec, ...]:
        return tuple(layer.spec(blocks) for layer in self.layers)

    def regions(self, blocks: int) -> list[Region]:
        """The views in payload order, with where each begins in a chunk of `blocks` blocks."""
        regions = []
        offset_bytes = 0
        for layer in self.layers:
            for rows in layer.rows:
                regions.append(Region(rows, offset_bytes))
                offset_bytes += blocks * layer.row_bytes
        return regions

    def facts(self) -> list[list[str | int | list[int]]]:
        """What makes two layouts incompatible, as plain JSON for the fingerprint."""
        return [
            [layer.name, layer.dtype, list(layer.outer), list(layer.inner), layer.row_bytes]
            for layer in self.layers
        ]


def group_layout(
    index: int, layer_names: Sequence[str], tensors: Mapping[str, torch.Tensor], num_blocks: int
) -> GroupLayout:
    """The layout of a group. A layer that has the same bytes as an earlier one (layers may share
    their cache) is left out. Raises `InvalidInput` for a layer that cannot be moved by blocks."""
    layers = []
    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    for name in layer_names:
        tensor = tensors[name]
        place = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
        if place not in seen:
            seen.add(place)
            layers.append(layer_layout(name, tensor, num_blocks))
    layers.sort(key=lambda layer: -DTYPE_BYTES[layer.dtype])  # a chunk has wider types first
    return GroupLayout(index, tuple(layers))


def layer_layout(name: str, tensor: torch.Tensor, num_blocks: int) -> LayerLayout:
    """Find the blocks in a layer's tensor; see the module's docstring."""
    if tensor.dtype in DTYPE_NAMES:
        dtype = DTYPE_NAMES[tensor.dtype]
    else:  # opaque bytes; a type that safetensors has no name for
        tensor, dtype = tensor.view(torch.uint8), "U8"
    dim = _block_dimension(name, tensor.shape, num_blocks)
    if tensor.shape[dim] != num_blocks:  # a block of the engine is several of its kernel's
        tensor = tensor.unflatten(dim, (num_blocks, -1))  # type: ignore[no-untyped-call]  # torch has no types here
    element_bytes = tensor.element_size()
    block_stride = tensor.stride(dim)
    others = [i for i in range(tensor.ndim) if i != dim and tensor.shape[i] > 1]
    others.sort(key=tensor.stride, reverse=True)
    inner = _dense_dimensions(tensor, others, block_stride)
    outer = others[: len(others) - len(inner)]
    if not inner:
        raise InvalidInput(
            name,
            f"no two elements of a block lie together (shape {tuple(tensor.shape)}, strides"
            f" {tuple(tensor.stride())}); choose another KV cache layout",
        )
    row_bytes = math.prod(tensor.shape[i] for i in inner) * element_bytes
    return LayerLayout(
        name,
        dtype,
        tuple(tensor.shape[i] for i in outer),
        tuple(tensor.shape[i] for i in inner),
        tuple(
            _byte_rows(tensor, offset, num_blocks, row_bytes, block_stride * element_bytes)
            for offset in _offsets(tensor, outer)
        ),
    )


def _block_dimension(name: str, shape: Sequence[int], num_blocks: int) -> int:
    """Dimension 0; or 1, when 0 is the pair of keys and values."""
    is_pair_first = len(shape) > 1 and shape[0] == 2 and shape[1] % num_blocks == 0
    if shape and shape[0] % num_blocks == 0 and not (is_pair_first and num_blocks < 2):
        return 0
    if is_pair_first:
        return 1
    raise InvalidInput(
        name, f"a KV tensor of shape {tuple(shape)} has no dimension of {num_blocks} blocks"
    )


def _dense_dimensions(tensor: torch.Tensor, others: Sequence[int], block_stride: int) -> list[int]:
    """The last of `others` (in memory order) that together are one run of bytes inside a block."""
    dense: list[int] = []
    run = 1
    for i in reversed(others):
        if tensor.stride(i) != run or run >= block_stride:
            break
        dense.insert(0, i)
        run *= tensor.shape[i]
    return dense


def _offsets(tensor: torch.Tensor, outer: Sequence[int]) -> list[int]:
    """Where each combination of the outer dimensions begins, in bytes of the storage."""
    offsets = [int(tensor.storage_offset())]
    for i in outer:
        offsets = [o + n * tensor.stride(i) for o in offsets for n in range(tensor.shape[i])]
    return [offset * tensor.element_size() for offset in offsets]


def _byte_rows(
    tensor: torch.Tensor, offset: int, num_blocks: int, row_bytes: int, stride_bytes: int
) -> torch.Tensor:
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(tensor.untyped_storage(), offset, (num_blocks, row_bytes), (stride_bytes, 1))
