"""`RedisTransport`: calls and events over two connections with one Redis server."""

from __future__ import annotations

from dynamo_core import MetricsScope, PluginConfig
from dynamo_wire.brokered import Addresses, BrokeredTransport

from dynamo_plugin_transport_redis.broker import RedisBroker
from dynamo_plugin_transport_redis.config import RedisConfig


class RedisTransport(BrokeredTransport):
    """Calls between processes over Redis or Valkey.

    Raises:
        ConfigError: a file of the settings cannot be used.
    """

    NAME = "redis"
    Config = RedisConfig

    def __init__(self, config: PluginConfig, metrics: MetricsScope) -> None:
        if not isinstance(config, RedisConfig):
            raise TypeError(f"RedisConfig is needed, not {type(config).__name__}")
        super().__init__(config, metrics, RedisBroker(config, metrics), Addresses(config.prefix, ":"))
