"""`kvfs serve`: a node without a mount, until a signal or, when asked, until it is idle."""

import logging
import signal

import trio

from kvfs.daemon import ending_signals, settle_memory
from kvfs.errors import KvfsError, first_of
from kvfs.life import running
from kvfs.node import Node
from kvfs.settings.words import Config
from kvfs.supervisor import tell_supervisor
from kvfs.watchdog import loop_watch

log = logging.getLogger(__name__)

_IDLE_POLL_S = 0.5


def serve_command(config: Config) -> int:
    """Serve in the foreground; 0 after a clean stop. Raises `KvfsError` when it cannot run."""
    problem: BaseExceptionGroup[KvfsError] | None = None
    settle_memory()
    try:
        trio.run(_serve, config, instruments=loop_watch(_serve))
    except* KvfsError as group:
        problem = group
    if problem is not None:
        raise first_of(problem)
    return 0


async def _serve(config: Config) -> None:
    async with running(config) as node:
        if config.idle_exit_s is None:  # else a client started it, whose supervisor it is not for
            tell_supervisor("READY=1")
        with trio.open_signal_receiver(*ending_signals()) as signals:
            async with trio.open_nursery() as nursery:
                if config.idle_exit_s is not None:
                    nursery.start_soon(_wait_idle, node, config.idle_exit_s, nursery.cancel_scope)
                async for number in signals:
                    log.info("%s: stopping", signal.Signals(number).name)
                    break
                nursery.cancel_scope.cancel()


async def _wait_idle(node: Node, idle_s: float, scope: trio.CancelScope) -> None:
    """Cancel `scope` when no client has been connected for a while."""
    idle_since_s = trio.current_time()
    while trio.current_time() - idle_since_s < idle_s:
        await trio.sleep(_IDLE_POLL_S)
        if node.clients:
            idle_since_s = trio.current_time()
    log.info("no client for %g s: leaving", idle_s)
    scope.cancel()
