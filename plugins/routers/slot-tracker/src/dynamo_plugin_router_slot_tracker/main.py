"""A process that runs the service until it is told to end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable

from dynamo_telemetry import configure_logging, shutdown_logging

from dynamo_plugin_router_slot_tracker.service import Service, ServiceSettings

log = logging.getLogger(__name__)

#: Seconds that the end may take before the process is ended all the same.
DEADLINE = 15.0
OVERDUE = 70


def serve(settings: ServiceSettings, *, log_level: str = "info", log_json: bool = False) -> int:
    """Run until SIGTERM or SIGINT; the exit code.

    Raises:
        ConfigError: the settings are wrong, or an address cannot be bound.
    """
    configure_logging(log_level, log_json)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(settings))
    finally:
        if not shutdown_logging():
            os._exit(OVERDUE)


async def _serve(settings: ServiceSettings) -> int:
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked.set)
    service = Service(settings)
    try:
        await service.start()
        log.info("ready for requests at %s", service.listener.url)
        if service.replicas is not None:
            log.info("replicas are told at %s", service.replicas.endpoint)
        await asked.wait()
        log.info("stopping")
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            # A second one ends the process at once.
            loop.remove_signal_handler(number)
        async with asyncio.timeout(DEADLINE):
            await service.aclose()
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
