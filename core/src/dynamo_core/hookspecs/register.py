"""Hooks that register plugin classes. Each is called once, at assembly, on the plugin that the config names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_core.hookspecs import hookspec

if TYPE_CHECKING:
    from dynamo_core.contracts.admission import Admission
    from dynamo_core.contracts.discovery import Discovery
    from dynamo_core.contracts.engine import LLMEngine
    from dynamo_core.contracts.extension import Extension
    from dynamo_core.contracts.frontend import Frontend
    from dynamo_core.contracts.parsers import ReasoningParser, ToolCallParser
    from dynamo_core.contracts.response_store import ResponseStore
    from dynamo_core.contracts.router import Router
    from dynamo_core.contracts.transports.transport import Transport


@hookspec
def dynamo_register_engines() -> list[type[LLMEngine]]:  # type: ignore[empty-body]
    """Return engines of this plugin.

    Called once when it is loaded; each class is known by its `NAME`; an exception stops the start with the plugin's
    name.
    """


@hookspec
def dynamo_register_transports() -> list[type[Transport]]:  # type: ignore[empty-body]
    """Return transports of this plugin.

    Called once when it is loaded; each class is known by its `NAME`; an exception stops the start with the plugin's
    name.
    """


@hookspec
def dynamo_register_discovery() -> list[type[Discovery]]:  # type: ignore[empty-body]
    """Return the discovery back ends of this plugin.

    Called once when it is loaded; each class is known by its `NAME`; an exception stops the start with the plugin's
    name.
    """


@hookspec
def dynamo_register_routers() -> list[type[Router]]:  # type: ignore[empty-body]
    """Return routers of this plugin.

    Called once when it is loaded; each class is known by its `NAME`; an exception stops the start with the plugin's
    name.
    """


@hookspec
def dynamo_register_admission() -> list[type[Admission]]:  # type: ignore[empty-body]
    """Return admission policies of this plugin.

    Called once when it is loaded; each class is known by its `NAME`; an exception stops the start with the plugin's
    name.
    """


@hookspec
def dynamo_register_frontends() -> list[type[Frontend]]:  # type: ignore[empty-body]
    """Return frontends of this plugin.

    Called once when it is loaded; each class is known by its `NAME`; an exception stops the start with the plugin's
    name.
    """


@hookspec
def dynamo_register_response_stores() -> list[type[ResponseStore]]:  # type: ignore[empty-body]
    """Return response stores of this plugin.

    Called once when it is loaded; each class is known by its `NAME`; an exception stops the start with the plugin's
    name.
    """


@hookspec
def dynamo_register_extensions() -> list[type[Extension]]:  # type: ignore[empty-body]
    """Return extensions of this plugin.

    Called once when it is loaded; each class is known by its `NAME`; an exception stops the start with the plugin's
    name.
    """


@hookspec
def dynamo_register_tool_parsers() -> list[type[ToolCallParser]]:  # type: ignore[empty-body]
    """Return parsers of this plugin that find calls of tools.

    Called once when it is loaded; each class is known by its `NAME`; an exception stops the start with the plugin's
    name.
    """


@hookspec
def dynamo_register_reasoning_parsers() -> list[type[ReasoningParser]]:  # type: ignore[empty-body]
    """Return parsers of this plugin that tell reasoning from content.

    Called once when it is loaded; each class is known by its `NAME`; an exception stops the start with the plugin's
    name.
    """
