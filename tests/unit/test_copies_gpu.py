"""Copies on a CUDA device: byte-exact, ordered behind the engine's work, through pinned slots."""

import pytest
import torch

from gpu_bridge.copies import CpuCopier, CudaCopier, copier_for
from gpu_bridge.layout import GroupLayout, group_layout
from gpu_bridge.staging import StagingPool
from kvfs.config import PAGE_BYTES

pytestmark = pytest.mark.gpu

BLOCKS, LAYERS = 64, 8


def make(layout: str) -> tuple[list[torch.Tensor], GroupLayout]:
    """Layers on the device in one memory order: layer by layer, all layers of a block together, or
    keys and values apart."""
    match layout:
        case "layers":
            memory = torch.randint(0, 255, (LAYERS, BLOCKS, 16, 2048), dtype=torch.uint8)
            layers = list(memory.cuda().view(torch.bfloat16))
        case "blocks":
            memory = torch.randint(0, 255, (BLOCKS, LAYERS, 16, 2048), dtype=torch.uint8)
            layers = list(memory.cuda().view(torch.bfloat16).unbind(1))
        case _:
            memory = torch.randint(0, 255, (LAYERS, 2, BLOCKS, 16, 1024), dtype=torch.uint8)
            layers = list(memory.cuda().view(torch.bfloat16))
    names = [f"l{i}" for i in range(LAYERS)]
    group = group_layout(0, names, dict(zip(names, layers, strict=True)), BLOCKS)
    return layers, group


def on_the_host(group: GroupLayout, layers: list[torch.Tensor]) -> GroupLayout:
    names = [layer.name for layer in group.layers]
    copies = {n: layer.cpu().contiguous() for n, layer in zip(names, layers, strict=True)}
    return group_layout(0, names, copies, BLOCKS)


@pytest.mark.parametrize("layout", ["layers", "blocks", "pairs"])
def test_blocks_go_out_and_come_back_through_pinned_slots(layout: str) -> None:
    layers, group = make(layout)
    copier = copier_for(layers[0].device)
    assert isinstance(copier, CudaCopier)
    ids = [5, 63, 0, 17]
    size = len(ids) * group.block_bytes
    pool = StagingPool(1, -(-size // PAGE_BYTES) * PAGE_BYTES, pin=True)
    with pool.slot(1) as slot:
        assert slot is not None
        assert slot.tensor.is_pinned()
        assert slot.tensor.data_ptr() % PAGE_BYTES == 0
        copier.gather(group, ids, slot.tensor[:size], copier.mark())
        expected = torch.zeros(size, dtype=torch.uint8)
        CpuCopier().gather(on_the_host(group, layers), ids, expected, None)
        assert torch.equal(slot.tensor[:size], expected)

        before = [layer.clone() for layer in layers]
        for region in group.regions(1):
            region.rows[ids] = 0
        copier.scatter(group, ids, range(len(ids)), len(ids), slot.tensor[:size], copier.mark())
        for layer, was in zip(layers, before, strict=True):
            assert torch.equal(layer.view(torch.uint8), was.view(torch.uint8))
        # Some rows only, into other blocks: all the rest stays.
        untouched = on_the_host(group, layers)
        copier.scatter(group, [40, 41], [3, 1], len(ids), slot.tensor[:size], copier.mark())
        CpuCopier().scatter(untouched, [40, 41], [3, 1], len(ids), expected, None)
        for ours, theirs in zip(group.regions(1), untouched.regions(1), strict=True):
            assert torch.equal(ours.rows.cpu(), theirs.rows)


def test_a_save_waits_for_the_engines_kernels_and_a_load_for_its_writes() -> None:
    layers, group = make("layers")
    copier = CudaCopier(layers[0].device)
    payload = torch.zeros(group.block_bytes, dtype=torch.uint8).pin_memory()
    torch.cuda._sleep(200_000_000)  # the engine is busy, and only then writes the block
    layers[0].view(torch.uint8)[7].fill_(0xAB)
    copier.gather(group, [7], payload, copier.mark())
    row_bytes = group.layers[0].row_bytes
    assert payload[:row_bytes].eq(0xAB).all()

    torch.cuda._sleep(200_000_000)
    layers[0].view(torch.uint8)[7].zero_()  # as vLLM zeroes new blocks
    copier.scatter(group, [7], [0], 1, payload, copier.mark())
    torch.cuda.synchronize()
    assert layers[0].view(torch.uint8)[7].eq(0xAB).all()
