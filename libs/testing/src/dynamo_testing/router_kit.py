"""The kit for routers: the promises about the choice, the accounting and the cost, as one check each.

The author's whole test file::

    import pytest
    from dynamo_testing.router_kit import RouterFactory, RouterKit

    class TestMine(RouterKit):
        @pytest.fixture
        def make_router(self) -> RouterFactory:
            return lambda services: MyRouter(MyConfig(), services)

The kit makes the workers and the load tracker, and reserves and releases routes as core does. It tells of KV caches
over the event plane of the services; a router that believes those and claims overlap is held to it. One that holds
something for requests, such as places in a queue, says how much by the method `held`. `CAN_PIN` says that requests can
name their worker.
"""

from __future__ import annotations

from dynamo_testing.router.accounting import AccountChecks
from dynamo_testing.router.choosing import ChoiceChecks
from dynamo_testing.router.cost import CostChecks
from dynamo_testing.router.harness import Fleet, RouterFactory, RouterHarness

__all__ = ["Fleet", "RouterFactory", "RouterHarness", "RouterKit"]


class RouterKit(ChoiceChecks, AccountChecks, CostChecks):
    """All checks of a router. Subclass it as ``Test…``, and write the fixture `make_router`."""
