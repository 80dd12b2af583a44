"""The parsers that a model's card names."""

from __future__ import annotations

from typing import cast

from dynamo_core.contracts.parsers import Parsers, ReasoningParser, ToolCallParser
from dynamo_core.plugins.loader import REASONING_PARSER, TOOL_PARSER, PluginLoader
from dynamo_core.protocol.records import ModelCard


def load_parsers(loader: PluginLoader, card: ModelCard) -> Parsers:
    """Loads the parsers of a model.

    Raises:
        PluginError: one is not installed or is broken.
    """
    tools, reasoning = card.runtime_config.tool_call_parser, card.runtime_config.reasoning_parser
    return Parsers(
        None if tools is None else cast("type[ToolCallParser]", loader.load(TOOL_PARSER, tools)),
        None if reasoning is None else cast("type[ReasoningParser]", loader.load(REASONING_PARSER, reasoning)),
    )
