"""A directory that gives its bytes as slowly as it is told to, as a FUSE file system: a tier for
benchmarks that every program can use alike.

    python scripts/slow_files.py DIRECTORY MOUNTPOINT BYTES_PER_S

Reads share one rate, in pieces of what the kernel asks for, first come first served; a write, a
look-up or a listing costs nothing. The kernel keeps nothing of it, so that no read is warm. Who
finds it idle waits for the first byte on: only a server that is not scheduled while reads wait
catches up, by `SAVED_BYTES_MAX` at most, and what a pause of up to `IDLE_S` saves is kept. A line
on standard input is another rate; the answer is a line, and so is the first word when it serves.
It leaves at the end of its standard input. Stop it with SIGSTOP for a tier that hangs.

`SlowDirectory` starts and ends one.
"""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import IO, Self

import pyfuse3
import trio

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from scripts.passing_files import Passing  # noqa: E402  (path first)
from scripts.tier_rig import TokenBucket  # noqa: E402  (path first)

SAVED_BYTES_MAX = 3 * 512 * 1024  # half as much again as the kernel's reads
IDLE_S = 0.02  # between two reads of one who reads all the time; a longer pause saves up nothing
START_DEADLINE_S = 20.0
STOP_DEADLINE_S = 10.0


class Slow(Passing):
    """Reads wait for their bytes in a queue."""

    def __init__(self, root: str, bytes_per_s: float) -> None:
        super().__init__(root)
        self._bucket = TokenBucket(bytes_per_s, SAVED_BYTES_MAX, trio.current_time())
        self._served_s = -inf  # when the last read had its bytes
        self._turn = trio.Lock()  # whose waiters are served in order
        self._changed = trio.Event()

    def set_rate(self, bytes_per_s: float) -> None:
        """0 stops all reads."""
        self._bucket.set_rate(bytes_per_s, trio.current_time())
        self._changed.set()
        self._changed = trio.Event()

    async def read(self, fh: int, off: int, size: int) -> bytes:
        arrived_s = trio.current_time()
        data = os.pread(fh, size, off)
        async with self._turn:
            if arrived_s - self._served_s > IDLE_S:
                self._bucket.empty(arrived_s)
            while (wait_s := self._bucket.take(len(data), trio.current_time())) != 0.0:
                with trio.move_on_after(inf if wait_s is None else wait_s):
                    await self._changed.wait()
            self._served_s = trio.current_time()
        return data


async def serve(files: Slow) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pyfuse3.main)
        nursery.start_soon(leave_when_told, nursery.cancel_scope)
        print("serves", flush=True)
        commands = trio.lowlevel.FdStream(os.dup(0))
        rest = b""
        async for data in commands:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                files.set_rate(float(line))
                print("done", flush=True)
        nursery.cancel_scope.cancel()


async def leave_when_told(everything: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            everything.cancel()


def main() -> None:
    directory, mountpoint, bytes_per_s = sys.argv[1:]

    async def run() -> None:
        files = Slow(directory, float(bytes_per_s))
        options = set(pyfuse3.default_options) | {"fsname=slow-files"}
        options.discard("default_permissions")
        pyfuse3.init(files, mountpoint, options)
        try:
            await serve(files)
        finally:
            pyfuse3.close(unmount=True)

    trio.run(run)


class SlowDirectory:
    """One that serves for the length of a `with` block. `files` is the directory below, where
    everything is as fast as it is."""

    def __init__(self, files: Path, mountpoint: Path, bytes_per_s: float) -> None:
        self.files = files
        self.mountpoint = mountpoint
        files.mkdir(parents=True, exist_ok=True)
        mountpoint.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, __file__, files, mountpoint, bytes_per_s]
        self._process = subprocess.Popen(
            [str(word) for word in words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in: IO[bytes] = self._process.stdin
        self._out: IO[bytes] = self._process.stdout
        try:
            self._wait_answer("serves")
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.thaw()
        with suppress(BrokenPipeError):  # it has ended before it read all
            self._in.close()
        try:
            self._process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_DEADLINE_S)
        self._out.close()
        if self._process.returncode != 0:  # it was killed, and left a mount that nobody serves
            subprocess.run(["umount", "--lazy", self.mountpoint], check=False, timeout=10)

    def set_rate(self, bytes_per_s: float) -> None:
        """From now on."""
        self._in.write(b"%f\n" % bytes_per_s)
        self._in.flush()
        self._wait_answer("done")

    def freeze(self) -> None:
        """Whoever touches it waits until it thaws."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self, *, is_killed: bool) -> None:
        """Have the server end before its time. A killed one leaves its mount until the `with` block
        ends."""
        if is_killed:
            self._process.kill()
        else:
            self._process.terminate()
        self._process.wait(STOP_DEADLINE_S)

    def _wait_answer(self, wanted: str) -> None:
        """RuntimeError when it says something else, or nothing for `START_DEADLINE_S`."""
        is_there = select.select([self._out], [], [], START_DEADLINE_S)[0]
        answer = self._out.readline().decode().strip() if is_there else ""
        if answer != wanted:
            raise RuntimeError(f"{self.mountpoint} does not serve: {answer!r}, not {wanted!r}")


if __name__ == "__main__":
    main()
