"""Where the bytes of blocks lie, for every memory order that an engine may choose."""

import itertools

import pytest
import torch

from gpu_bridge.copies import CpuCopier, gather_rows, scatter_rows
from gpu_bridge.layout import GroupLayout, group_layout, layer_layout
from kvfs.errors import InvalidInput

BLOCKS, HEADS, TOKENS, CONTENT = 6, 3, 4, 8
COPIER = CpuCopier()


def permuted(order: tuple[int, ...], layers: int = 2) -> list[torch.Tensor]:
    """Layers of shape [blocks, heads, tokens, content] that lie in memory in an order of the
    dimensions layer 0, block 1, head 2, token 3, content 4."""
    shape = (layers, BLOCKS, HEADS, TOKENS, CONTENT)
    memory = torch.zeros([shape[i] for i in order], dtype=torch.float32)
    whole = memory.permute([order.index(i) for i in range(5)])
    whole.copy_(torch.arange(whole.numel(), dtype=torch.float32).view(shape))
    return [whole[i] for i in range(layers)]


def layout_of(layers: list[torch.Tensor]) -> GroupLayout:
    return group_layout(0, [str(i) for i in range(len(layers))], dict(named(layers)), BLOCKS)


def named(layers: list[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    return [(str(i), layer) for i, layer in enumerate(layers)]


@pytest.mark.parametrize(
    "order",
    [(0, *rest) for rest in itertools.permutations((1, 2, 3, 4))]
    + [(1, 0, 2, 3, 4), (1, 0, 3, 2, 4), (1, 2, 0, 3, 4), (2, 1, 0, 3, 4)],
)
def test_blocks_go_out_and_come_back_in_any_memory_order(order: tuple[int, ...]) -> None:
    if order[-1] == 1:
        with pytest.raises(InvalidInput, match="choose another KV cache layout"):
            layout_of(permuted(order))
        return
    layers = permuted(order)
    before = [layer.clone() for layer in layers]
    group = layout_of(layers)
    assert group.block_bytes == 2 * HEADS * TOKENS * CONTENT * 4
    payload = torch.zeros(3 * group.block_bytes, dtype=torch.uint8)
    COPIER.gather(group, [4, 1, 5], payload, None)
    for layer in layers:
        layer[[4, 1, 5]] = -1
    COPIER.scatter(group, [4, 1, 5], [0, 1, 2], 3, payload, None)
    for layer, was in zip(layers, before, strict=True):
        assert torch.equal(layer, was)
    # Rows may go to other blocks, and only those change.
    COPIER.scatter(group, [2], [1], 3, payload, None)
    for layer, was in zip(layers, before, strict=True):
        assert torch.equal(layer[2], was[1])
        assert torch.equal(layer[[0, 1, 3, 4, 5]], was[[0, 1, 3, 4, 5]])


def test_a_chunk_of_equal_tokens_has_equal_bytes_wherever_its_blocks_are() -> None:
    layers = permuted((0, 1, 2, 3, 4))
    for layer in layers:
        layer[2], layer[3] = layer[0], layer[1]
    group = layout_of(layers)
    payloads = [torch.zeros(2 * group.block_bytes, dtype=torch.uint8) for _ in range(2)]
    COPIER.gather(group, [0, 1], payloads[0], None)
    COPIER.gather(group, [2, 3], payloads[1], None)
    assert torch.equal(*payloads)


def test_keys_and_values_apart_are_two_views() -> None:
    pair = torch.arange(2 * BLOCKS * 40, dtype=torch.float16).view(2, BLOCKS, 5, 8)
    layer = layer_layout("l", pair, BLOCKS)
    assert (len(layer.rows), layer.outer, layer.inner) == (2, (2,), (5, 8))
    assert layer.rows[1][3].view(torch.float16).tolist() == pair[1, 3].flatten().tolist()
    assert layer.spec(2).shape == (2, 2, 5, 8)


def test_kernel_blocks_are_grouped_to_the_engines_blocks() -> None:
    tensor = torch.arange(BLOCKS * 4 * 8, dtype=torch.bfloat16).view(BLOCKS * 4, 8)
    layer = layer_layout("l", tensor, BLOCKS)
    assert (layer.row_bytes, layer.spec(1).shape) == (4 * 8 * 2, (1, 4, 8))
    assert layer.rows[0][2].view(torch.bfloat16).tolist() == tensor[8:12].flatten().tolist()


def test_padding_between_blocks_is_neither_read_nor_written() -> None:
    memory = torch.full((BLOCKS, 10), 7, dtype=torch.uint8)
    layer = layer_layout("l", memory[:, :8], BLOCKS)
    group = GroupLayout(0, (layer,))
    COPIER.scatter(group, [1, 2], [0, 1], 2, torch.zeros(16, dtype=torch.uint8), None)
    assert memory[:, 8:].eq(7).all()
    assert memory[1:3, :8].eq(0).all()


def test_groups_that_share_memory_stay_apart_by_their_blocks() -> None:
    shared = permuted((0, 1, 2, 3, 4), layers=1)[0]
    first, second = (group_layout(i, [f"l{i}"], {f"l{i}": shared}, BLOCKS) for i in (0, 1))
    payload = torch.zeros(first.block_bytes, dtype=torch.uint8)
    COPIER.gather(first, [1], payload, None)
    before = shared.clone()
    COPIER.scatter(second, [4], [0], 1, payload, None)
    assert torch.equal(shared[4], before[1])
    assert torch.equal(shared[:4], before[:4])


def test_a_layer_that_reads_anothers_cache_is_stored_once() -> None:
    tensor = torch.zeros(BLOCKS, 8)
    group = group_layout(0, ["a", "b"], {"a": tensor, "b": tensor}, BLOCKS)
    assert [layer.name for layer in group.layers] == ["a"]


def test_wider_types_come_first_and_types_without_a_name_are_bytes() -> None:
    tensors = {
        "narrow": torch.zeros(BLOCKS, 3, dtype=torch.int8),
        "wide": torch.zeros(BLOCKS, 2, dtype=torch.float32),
        "odd": torch.zeros(BLOCKS, 2, dtype=torch.complex64),
    }
    group = group_layout(0, list(tensors), tensors, BLOCKS)
    assert [(s.name, s.dtype, s.shape) for s in group.specs(2)] == [
        ("wide", "F32", (2, 2)),
        ("narrow", "I8", (2, 3)),
        ("odd", "U8", (2, 16)),
    ]


def test_a_tensor_without_blocks_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"shape \(5, 8\) has no dimension of 6 blocks"):
        layer_layout("l", torch.zeros(5, 8), BLOCKS)


@pytest.mark.parametrize("content", [8, 6, 7])
def test_the_devices_kernels_move_the_same_bytes_as_the_cpus(content: int) -> None:
    """The same code that runs on a CUDA device, here on the CPU: rows of 8, 2 and 1 byte words."""
    memory = torch.randint(0, 255, (BLOCKS, 2, content), dtype=torch.uint8)
    group = GroupLayout(0, (layer_layout("l", memory, BLOCKS),))
    ids = torch.tensor([5, 0, 3])
    expected, payload = (torch.zeros(3 * group.block_bytes, dtype=torch.uint8) for _ in range(2))
    COPIER.gather(group, ids.tolist(), expected, None)
    gather_rows(group, ids, payload)
    assert torch.equal(payload, expected)
    before = memory.clone()
    memory[[1, 2]] = 0
    scatter_rows(group, torch.tensor([1, 2]), torch.tensor([2, 0]), 3, payload)
    assert torch.equal(memory[[1, 2]], before[[3, 5]])
    assert torch.equal(memory[[0, 3, 4, 5]], before[[0, 3, 4, 5]])
