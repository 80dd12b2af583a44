"""`EtcdDiscovery`: the plugin. Leases and watches of one process over a cluster shared with others."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from aiohttp import ServerDisconnectedError
from dynamo_core import MetricsScope, PluginConfig, quote_greeting, read_greeting
from dynamo_core.errors import CannotConnect, ConfigError
from dynamo_leases import OnChange, RemoteDiscovery, Session, UnsupportedServer

from dynamo_plugin_discovery_etcd.client import Client, tls_context
from dynamo_plugin_discovery_etcd.config import EtcdConfig
from dynamo_plugin_discovery_etcd.errors import as_config_error
from dynamo_plugin_discovery_etcd.follower import EtcdFollower
from dynamo_plugin_discovery_etcd.store import Store
from dynamo_plugin_discovery_etcd.wire import Keys


class EtcdDiscovery(RemoteDiscovery[Store]):
    """Discovery for the processes of one system, on any number of hosts.

    The id of a lease is that of the lease in etcd, which counts in full seconds and has a minimum, usually 2: both
    round up.
    """

    NAME = "etcd"
    UNREACHABLE = "discovery.endpoints: {}; start the cluster, or name the right one"
    Config = EtcdConfig

    def __init__(self, config: PluginConfig, metrics: MetricsScope) -> None:
        assert isinstance(config, EtcdConfig)  # noqa: S101 - the loader validates with `Config`
        super().__init__(
            config,
            metrics,
            ttl=config.ttl,
            heartbeat=config.heartbeat,
            start_timeout=config.start_timeout,
        )
        self._settings = config

    @staticmethod
    def _as_config_error(error: CannotConnect) -> ConfigError | None:
        return as_config_error(error)

    async def _probe(self) -> None:
        try:
            await super()._probe()
        except CannotConnect as error:
            if isinstance(error.__cause__, ServerDisconnectedError):
                await self._refuse_strangers()
            raise

    async def _refuse_strangers(self) -> None:
        """Find out which server hangs up on HTTP, as Redis does, which takes it for an attack."""
        for endpoint in self._settings.endpoints:
            address = urlsplit(endpoint)
            words = (
                b"" if address.scheme == "https" else await read_greeting(address.hostname or "", address.port or 80)
            )
            if words and not words.startswith(b"HTTP/"):
                raise UnsupportedServer(f"this is no etcd: {endpoint} answers {quote_greeting(words)}")

    async def _connect(self, on_change: OnChange) -> Session[Store]:
        settings = self._settings
        tls = await asyncio.to_thread(tls_context, settings)
        store = Store(Client(settings, tls), Keys(settings.prefix))
        follower = EtcdFollower(
            store, ttl=settings.ttl, poll=settings.poll, timeout=settings.timeout, on_change=on_change
        )
        return Session(store, follower, lost_after=settings.lost_after)
