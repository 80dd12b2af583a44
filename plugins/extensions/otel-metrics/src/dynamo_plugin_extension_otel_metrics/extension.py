"""The extension `otel-metrics`: reads the events of requests, and records each end of a request."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Final

from dynamo_core import Extension, ExtensionServices, PluginConfig, RequestFinished

from dynamo_plugin_extension_otel_metrics.settings import OtelMetricsConfig, check_environment

if TYPE_CHECKING:
    from dynamo_plugin_extension_otel_metrics.export import Export

log = logging.getLogger(__name__)

#: Events that wait to be read: those of a second or two of the greatest load.
_CAPACITY: Final = 16_384
#: Requests that are recorded before others have their turn: some milliseconds.
_AT_ONCE: Final = 100
#: Seconds for the last events, and for their values to leave. Core waits five for both.
_LAST_EVENTS: Final = 1.0
_LAST_EXPORT: Final = 3.0


class OtelMetricsExtension(Extension):
    """Records in the SDK of OpenTelemetry, which sends the values in a thread of its own.

    Raises:
        ConfigError: a variable of the environment is wrong.
    """

    NAME = "otel-metrics"
    Config = OtelMetricsConfig
    config: OtelMetricsConfig

    def __init__(self, config: PluginConfig, services: ExtensionServices) -> None:
        super().__init__(config, services)
        self._disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        if not self._disabled:
            check_environment(os.environ, self.config)
        self._reading: asyncio.Task[None] | None = None
        self._export: Export | None = None

    async def start(self) -> None:
        """Begin to read events."""
        if self._disabled:
            log.info("no metrics are exported: OTEL_SDK_DISABLED is true")
            return
        # It takes a while, and no client waits yet.
        from dynamo_plugin_extension_otel_metrics.export import Export

        self._events = self.services.requests.subscribe(_CAPACITY)
        self._reading = self.spawn(self._read(Export), name="read events")

    async def aclose(self) -> None:
        """Record the last events, and send what the collector does not have yet."""
        if self._reading is not None:
            await self._events.aclose()
            await asyncio.wait([self._reading], timeout=_LAST_EVENTS)
        await super().aclose()
        export, self._export = self._export, None
        if export is not None:
            await asyncio.to_thread(export.close, _LAST_EXPORT)

    async def _read(self, make: type[Export]) -> None:
        while events := await self._events.batch():
            if self._export is None:
                # When requests come, the frontend has registered, and with that the id that it keeps. Detectors of
                # resources, which the environment may name, ask services of the network.
                instance = f"{self.services.peers.own.frontend_id:x}"
                self._export = await asyncio.to_thread(make, self.config.endpoint, self.config.interval, instance)
            ended = [event.record for event in events if isinstance(event, RequestFinished)]
            for number, record in enumerate(ended, 1):
                self._export.instruments.add(record)
                if number % _AT_ONCE == 0:
                    await asyncio.sleep(0)
