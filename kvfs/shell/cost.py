"""What loading chunks costs, measured on a part of them.

What computing them again would cost only the engine knows: it depends on its model and its device.
"""

import time
from collections.abc import Sequence

from kvfs.client import Client
from kvfs.config import PAGE_BYTES
from kvfs.file_io import allocate, read_into

SAMPLE_BYTES = 64 * 1024 * 1024
SAMPLE_FILES = 64


def measure_load_s(client: Client, paths: Sequence[bytes], size_bytes: int) -> float | None:
    """Seconds to read files of `size_bytes` in all with one thread, as the bridge reads them;
    None when none of them can be read. A look: it counts as no use."""
    step = max(1, len(paths) // SAMPLE_FILES)
    read_bytes = 0
    spent_s = 0.0
    memory = allocate(min(size_bytes, SAMPLE_BYTES))
    for offset in range(0, len(memory), PAGE_BYTES):
        memory[offset] = 0  # so that memory is there before it counts, as the bridge's buffers are
    for path in paths[::step]:
        left_bytes = len(memory) - read_bytes
        begin_s = time.perf_counter()
        (file,) = client.open([path], is_use=False)
        if file is None:
            continue
        with file:
            wanted_bytes = min(file.size_bytes, left_bytes)
            read_bytes += read_into(file.fd, memory, wanted_bytes)
        spent_s += time.perf_counter() - begin_s
        if read_bytes >= SAMPLE_BYTES:
            break
    return spent_s * size_bytes / read_bytes if read_bytes else None
