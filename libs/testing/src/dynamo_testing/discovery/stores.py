"""The kit for discoveries whose store is a server: they have a thread that keeps leases alive."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

from dynamo_testing.discovery.harness import Directories
from dynamo_testing.discovery_kit import DiscoveryKit
from dynamo_testing.optional_packages import pytest


def thread_runs(name: str) -> bool:
    """Return whether this process has a thread of that name."""
    return any(thread.name == name for thread in threading.enumerate())


class StoreKit(DiscoveryKit):
    """`DiscoveryKit` over a server that hangs. It needs two fixtures.

    `store` is the server, with `freeze` and `resume`; `make` makes clients of it, which it closes.
    """

    TTL = 2.0
    WAIT = 20.0
    CAN_KILL_OWNER = True
    CAN_CUT_STORE = True
    #: The thread that keeps leases alive: its name, and the attribute of a client that holds it.
    THREAD: ClassVar[str]
    THREAD_OF_CLIENT: ClassVar[str] = "_thread"
    #: What the fixture `store` gave to this test.
    server: Any

    @pytest.fixture
    async def directories(self, store: Any, make: Any) -> Directories:
        self.server = store
        one, other = make(), make()
        await one.start()
        await other.start()
        return Directories(one=one, other=other)

    async def kill_owner(self, directories: Directories) -> None:
        # Its heartbeats end; nothing is removed.
        getattr(directories.one, self.THREAD_OF_CLIENT).stop(self.WAIT)

    async def cut_store(self, directories: Directories) -> None:
        self.server.freeze()

    async def restore_store(self, directories: Directories) -> None:
        self.server.resume()

    async def test_the_thread_ends_with_discovery(self, make: Any) -> None:
        discovery = make()
        lease = await discovery.lease()
        assert thread_runs(self.THREAD)

        await discovery.aclose()
        await discovery.aclose()
        await lease.aclose()

        assert not thread_runs(self.THREAD)
        with pytest.raises(ValueError, match="closed"):
            await discovery.lease()
