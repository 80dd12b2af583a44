"""The kit for discovery: every promise about leases, records and watches as one check.

The author's whole test file::

    from collections.abc import AsyncIterator

    import pytest
    from dynamo_core.contracts.config import PluginConfig
    from dynamo_telemetry.metrics import Metrics
    from dynamo_testing.discovery_kit import Directories, DiscoveryKit

    class TestMine(DiscoveryKit):
        @pytest.fixture
        async def directories(self) -> AsyncIterator[Directories]:
            one, other = (MyDiscovery(PluginConfig(), Metrics()) for _ in range(2))
            await one.start()
            await other.start()
            yield Directories(one=one, other=other)
            await one.aclose()
            await other.aclose()

Both are clients of one store. Every check works under a prefix of its own, so that the store may be shared. Checks of
what the harness cannot do (kill an owner, cut off the store) are skipped unless the class says that it can; see
`DiscoveryHarness`. With pytest-asyncio in strict mode, decorate the fixture with ``pytest_asyncio.fixture``.
"""

from __future__ import annotations

from dynamo_testing.discovery.harness import Directories, DiscoveryHarness
from dynamo_testing.discovery.leases import LeaseChecks
from dynamo_testing.discovery.watches import WatchChecks

__all__ = ["Directories", "DiscoveryHarness", "DiscoveryKit"]


class DiscoveryKit(LeaseChecks, WatchChecks):
    """All checks of a discovery. Subclass it as ``Test…`` and write the fixture `directories`."""
