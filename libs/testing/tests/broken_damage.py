"""A transport that does not notice that bits have flipped, and what of the kit must find it.

Not collected with the other tests: `test_kits_on_broken_parts` runs this file and compares.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import ClassVar

import pytest
from dynamo_core.protocol import Instance
from dynamo_plugin_transport_tcp.address import Address
from dynamo_plugin_transport_tcp.config import TcpConfig
from dynamo_plugin_transport_tcp.transport import TcpTransport
from dynamo_telemetry import Metrics
from dynamo_testing.faults import FaultProxy, Raw
from dynamo_testing.transport.damage import TEXT, DamageChecks, Damaged, speak


class Broken(DamageChecks):
    """The checks over tcp, through a wire on which bits flip."""

    MANY_FLIPS: ClassVar[int] = 300
    LEAST_WHOLE: ClassVar[int] = 10

    #: The calls wait as long as their clients do.
    WAIT: ClassVar[float] = 10.0
    PATIENCE = (10.0, 10.0)
    checksum: ClassVar[bool] = True
    #: The checks that must fail, and no others may.
    FAILS: ClassVar[frozenset[str]] = frozenset()

    @pytest.fixture
    async def damaged(self) -> AsyncIterator[Damaged]:
        config = TcpConfig(heartbeat=0.1, silence=0.5, connect_timeout=0.5, accept_timeout=0.5, checksum=self.checksum)
        async with AsyncExitStack() as stack:

            def make() -> TcpTransport:
                made = TcpTransport(config, Metrics())
                stack.push_async_callback(made.aclose)
                return made

            there = Address.parse((await make().serve(7, TEXT, speak)).address["tcp"])
            proxy = await stack.enter_async_context(FaultProxy(there.host, there.port, framing=Raw()))
            instance = Instance(instance_id=7, address={"tcp": str(Address(proxy.host, proxy.port, there.nonce))})
            yield Damaged([make() for _ in range(8)], instance, proxy.plan)


class TestWithoutAFault(Broken):
    pass


class TestWithoutChecksums(Broken):
    checksum = False

    FAILS = frozenset(
        {
            "test_no_answer_is_another_than_was_sent_though_bits_flip",
            "test_no_answer_is_another_than_was_sent_though_many_bits_flip",
        }
    )
