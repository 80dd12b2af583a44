"""`KubernetesDiscovery`: the plugin. Leases and watches of one process over a namespace shared with others."""

from __future__ import annotations

import asyncio
import os
import socket

from dynamo_core import MetricsScope, PluginConfig
from dynamo_core.errors import CannotConnect, ConfigError
from dynamo_leases import OnChange, RemoteDiscovery, Session

from dynamo_plugin_discovery_kubernetes.access import find_access
from dynamo_plugin_discovery_kubernetes.client import Client
from dynamo_plugin_discovery_kubernetes.config import KubernetesConfig
from dynamo_plugin_discovery_kubernetes.errors import as_config_error
from dynamo_plugin_discovery_kubernetes.follower import KubernetesFollower
from dynamo_plugin_discovery_kubernetes.objects import Objects
from dynamo_plugin_discovery_kubernetes.store import Store


class KubernetesDiscovery(RemoteDiscovery[Store]):
    """Discovery for the pods of one namespace."""

    NAME = "kubernetes"
    UNREACHABLE = "discovery.url: {}; name the right API server, or see why it does not serve"
    Config = KubernetesConfig

    def __init__(self, config: PluginConfig, metrics: MetricsScope) -> None:
        assert isinstance(config, KubernetesConfig)  # noqa: S101 - the loader validates with `Config`
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

    async def _connect(self, on_change: OnChange) -> Session[Store]:
        settings = self._settings
        access = await asyncio.to_thread(find_access, settings)
        objects = Objects(access.namespace, settings.prefix, f"{access.pod or socket.gethostname()}/{os.getpid()}")
        store = Store(Client(access, settings.timeout), objects, access.pod)
        follower = KubernetesFollower(
            store, ttl=settings.ttl, poll=settings.poll, watch_timeout=settings.watch_timeout, on_change=on_change
        )
        return Session(store, follower, lost_after=settings.lost_after)
