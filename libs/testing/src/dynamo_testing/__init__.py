"""Conformance kits for plugin authors: the promises of each kind of plugin as ready-made checks.

For engines:

- `run_conformance` holds an engine to its contract and raises the failure by its name (`StartFailed`, …),
- `EngineConformance` is the same as a class of tests,
- `mock_context` and `cancelling_context` are for tests written by hand.

The other kits are base classes of tests; the author's whole test file is a subclass with one fixture that makes the
real thing: `dynamo_testing.transport_kit.TransportKit` and `dynamo_testing.events_kit.EventsKit` for
transports, `dynamo_testing.discovery_kit.DiscoveryKit` for discovery,
`dynamo_testing.admission_kit.AdmissionKit` for admission,
`dynamo_testing.router_kit.RouterKit` for routers,
`dynamo_testing.frontend_kit.FrontendKit` for frontends,
`dynamo_testing.extension_kit.ExtensionKit` for extensions,
`dynamo_testing.response_store_kit.ResponseStoreKit` for response stores,
`dynamo_testing.parser_kit.ToolParserKit` and `ReasoningParserKit` for parsers. `dynamo_testing.strategies` makes
requests and outputs for tests with hypothesis.

Classes of tests need the extra ``testing``, the functions do not. The names below are loaded when first used.
"""

import sys

from dynamo_core.lazy import exports as _exports

__getattr__, __dir__, __all__ = _exports(__name__, __file__)

if "pytest" in sys.modules:
    import pytest

    from dynamo_testing.assertion_rewriting import REWRITTEN as _REWRITTEN

    # Before any of them is imported.
    pytest.register_assert_rewrite(*_REWRITTEN)
