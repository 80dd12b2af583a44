"""Kits that a plugin's author runs: what every plugin of a kind has promised, as ready-made tests.

Needs the extra ``testing``. A kit is a base class of tests; the author's whole test file is a subclass of it with one
fixture that makes the real thing:

- `dynamo_core.testing.transport_kit.TransportKit` and `dynamo_core.testing.events_kit.EventsKit` for transports,
- `dynamo_core.testing.discovery_kit.DiscoveryKit` for discovery.

`dynamo_core.testing.strategies` makes requests and outputs for tests with hypothesis.
"""

from __future__ import annotations

import pytest

# Before any of them is imported: without it a check that fails would say no more than "AssertionError".
pytest.register_assert_rewrite(
    "dynamo_core.testing.transport",
    "dynamo_core.testing.transport_kit",
    "dynamo_core.testing.events",
    "dynamo_core.testing.events_kit",
    "dynamo_core.testing.discovery",
    "dynamo_core.testing.discovery_kit",
)
