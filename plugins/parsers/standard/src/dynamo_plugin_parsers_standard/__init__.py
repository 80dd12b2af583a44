"""Parsers of tool calls and reasoning, by the names that a worker's model section uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_core import hookimpl

if TYPE_CHECKING:
    from dynamo_core import ReasoningParser, ToolCallParser

DYNAMO_API = 1


@hookimpl
def dynamo_register_tool_parsers() -> list[type[ToolCallParser]]:
    """Return one class for each way in which models write calls."""
    from dynamo_plugin_parsers_standard.harmony import GptOssParser
    from dynamo_plugin_parsers_standard.json_formats import JSON_PARSERS
    from dynamo_plugin_parsers_standard.parameter_formats import PARAMETER_PARSERS
    from dynamo_plugin_parsers_standard.response_template import TemplateParser

    return [*JSON_PARSERS, *PARAMETER_PARSERS, GptOssParser, TemplateParser]


@hookimpl
def dynamo_register_reasoning_parsers() -> list[type[ReasoningParser]]:
    """Return one class for each way in which models mark what they think."""
    from dynamo_plugin_parsers_standard import think_tags
    from dynamo_plugin_parsers_standard.harmony import GptOssReasoningParser
    from dynamo_plugin_parsers_standard.reasoning_regions import TemplateReasoningParser

    return [
        GptOssReasoningParser,
        think_tags.ThinkParser,
        think_tags.Qwen3Parser,
        think_tags.DeepSeekR1Parser,
        think_tags.DeepSeekV31Parser,
        think_tags.Glm45Parser,
        think_tags.GraniteParser,
        think_tags.MistralThinkParser,
        think_tags.MiniMaxM2ThinkParser,
        think_tags.KimiK2ThinkParser,
        think_tags.Olmo3ThinkParser,
        think_tags.NemotronThinkParser,
        think_tags.SeedOssParser,
        think_tags.Gemma4ThinkParser,
        TemplateReasoningParser,
    ]
