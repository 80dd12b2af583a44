"""Modules whose assertions pytest explains: without it a check that fails would say no more than "AssertionError"."""

REWRITTEN = (
    "dynamo_testing.transport",
    "dynamo_testing.transport_kit",
    "dynamo_testing.events",
    "dynamo_testing.events_kit",
    "dynamo_testing.admission",
    "dynamo_testing.admission_kit",
    "dynamo_testing.router",
    "dynamo_testing.router_kit",
    "dynamo_testing.discovery",
    "dynamo_testing.discovery_kit",
    "dynamo_testing.frontend",
    "dynamo_testing.frontend_kit",
    "dynamo_testing.extension",
    "dynamo_testing.extension_kit",
    "dynamo_testing.parser",
    "dynamo_testing.parser_kit",
    "dynamo_testing.brokered",
    "dynamo_testing.brokered_kit",
    "dynamo_testing.settings",
    "dynamo_testing.server_process",
)
