"""A real redis-server that tests of plugins with shared counts may stop, kill and start anew."""

from __future__ import annotations

from dynamo_testing.servers.redis_server import make_server, redis_binary, server

__all__ = ["make_server", "redis_binary", "server"]
