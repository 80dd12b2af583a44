"""The meeting point of two engines' connectors, passed in the environment."""

from __future__ import annotations

import socket

from dynamo_core import BackendError

#: Attempts at finding free ports that follow each other.
_TRIES = 50


def side_channel(host: str, port: int, *, replica: int, ranks: int) -> dict[str, str]:
    """Return the variables of vLLM's NIXL connector.

    A `port` is that of the first replica; 0 takes one that is free now.

    Raises:
        BackendError.EngineShutdown: no ports are free.
    """
    first = port + replica * ranks if port else _free(ranks)
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(first)}


def _free(count: int) -> int:
    for _ in range(_TRIES):
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            if _all_free(range(port + 1, port + count)):
                return port
    raise BackendError.EngineShutdown(f"there are no {count} free ports in a row for NIXL: set nixl_port")


def _all_free(ports: range) -> bool:
    for port in ports:
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except (OSError, OverflowError):
                return False
    return True
