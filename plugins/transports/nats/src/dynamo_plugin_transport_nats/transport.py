"""`NatsTransport`: calls and events over one connection with the NATS servers."""

from __future__ import annotations

from dynamo_core import MetricsScope, PluginConfig
from dynamo_wire.brokered import Addresses, BrokeredTransport

from dynamo_plugin_transport_nats.broker import NatsBroker
from dynamo_plugin_transport_nats.config import NatsConfig


class NatsTransport(BrokeredTransport):
    """Calls between processes over NATS.

    Raises:
        ConfigError: a file or key of the settings cannot be used.
    """

    NAME = "nats"
    Config = NatsConfig

    def __init__(self, config: PluginConfig, metrics: MetricsScope) -> None:
        if not isinstance(config, NatsConfig):
            raise TypeError(f"NatsConfig is needed, not {type(config).__name__}")
        super().__init__(config, metrics, NatsBroker(config, metrics), Addresses(config.prefix, "."))
