"""The kit for transports: every promise about calls and streams as one check.

The author's whole test file::

    from collections.abc import AsyncIterator

    import pytest
    from dynamo_core.contracts.config import PluginConfig
    from dynamo_telemetry.metrics import Metrics
    from dynamo_testing.transport_kit import Planes, TransportKit

    class TestMine(TransportKit):
        @pytest.fixture
        async def planes(self) -> AsyncIterator[Planes]:
            server, client = (MyTransport(PluginConfig(), Metrics()) for _ in range(2))
            await server.start()
            await client.start()
            yield Planes(server=server, client=client)
            await client.aclose()
            await server.aclose()

Checks of what the harness cannot do (break a connection, say) are skipped unless the class says that it can; see
`TransportHarness`. With pytest-asyncio in strict mode, decorate the fixture with ``pytest_asyncio.fixture``.
"""

from __future__ import annotations

from dynamo_testing.transport.caller_cancellation import StopChecks
from dynamo_testing.transport.contexts import ContextChecks
from dynamo_testing.transport.endings import EndChecks
from dynamo_testing.transport.errors import ErrorChecks
from dynamo_testing.transport.flow import FlowChecks
from dynamo_testing.transport.hanging import HangChecks
from dynamo_testing.transport.harness import Planes, TransportHarness
from dynamo_testing.transport.payloads import PayloadChecks
from dynamo_testing.transport.streams import StreamChecks

__all__ = ["Planes", "TransportHarness", "TransportKit"]


class TransportKit(
    StreamChecks, ErrorChecks, StopChecks, PayloadChecks, FlowChecks, EndChecks, HangChecks, ContextChecks
):
    """All checks of a transport. Subclass it as ``Test…`` and write the fixture `planes`."""
