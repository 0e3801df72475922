"""A file system that is asked again a moment after each answer, beside a task that becomes runnable
together with each of its handlers.

    turns_probe.py MOUNTPOINT

Says, on standard output, how many requests there were, and how many began before the task had the
turn that it was due.
"""

import os
import sys
import threading
import time

import pyfuse3
import trio

REQUESTS = 60
PAUSE_S = 0.002  # more than `request_wait_us`, less than tasks may be kept waiting at most


class Asked(pyfuse3.Operations):
    request_wait_us = 100

    def __init__(self) -> None:
        super().__init__()
        self.is_ready = trio.Event()
        self.wake = trio.Event()
        self.is_due = False
        self.requests = self.overtaken = 0

    def init(self) -> None:
        self.is_ready.set()

    async def statfs(self, ctx):
        self.requests += 1
        self.overtaken += self.is_due
        self.is_due = True
        self.wake.set()
        await trio.lowlevel.checkpoint()  # from here both have a turn, in either order
        return pyfuse3.StatvfsData()

    async def take_turns(self) -> None:
        while True:
            await self.wake.wait()
            self.wake = trio.Event()
            self.is_due = False


def ask(mountpoint: str, token: trio.lowlevel.TrioToken, end: trio.Event) -> None:
    for _ in range(REQUESTS):
        os.statvfs(mountpoint)
        time.sleep(PAUSE_S)
    token.run_sync_soon(end.set)


async def serve(operations: Asked, mountpoint: str) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pyfuse3.main)
        nursery.start_soon(operations.take_turns)
        await operations.is_ready.wait()
        end = trio.Event()
        arguments = mountpoint, trio.lowlevel.current_trio_token(), end
        threading.Thread(target=ask, args=arguments, daemon=True).start()
        with trio.fail_after(20):
            await end.wait()
        nursery.cancel_scope.cancel()
    print(operations.requests, operations.overtaken)


def main(mountpoint: str) -> None:
    operations = Asked()
    pyfuse3.init(operations, mountpoint, {"fsname=turns_probe"})
    try:
        trio.run(serve, operations, mountpoint)
    finally:
        pyfuse3.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
