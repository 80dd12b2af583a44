"""The grammar of a whole answer: reasoning, then calls of tools, or a value that obeys a schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynamo_core import GuidedDecodingOptions

if TYPE_CHECKING:
    from dynamo_core import ReasoningParser, ToolCallParser

    from dynamo_generation.requests.chat import ChatRequest


def answer_grammar(
    chat: ChatRequest,
    tools: Sequence[Mapping[str, Any]],
    own: type[ToolCallParser] | None,
    reasoning: ReasoningParser | None,
) -> GuidedDecodingOptions | None:
    """Return what an engine with guided decoding is asked for.

    None if the answer is free, or there is no grammar of it. `tools` are those that may be called, as the client sent
    them. `own` and `reasoning` are the parsers of the model, which know how it writes.
    """
    plain = chat.guided
    if plain is not None:
        # JSON alone needs no tag, and other constraints have none.
        if reasoning is None or plain.json is None or plain.backend or plain.whitespace_pattern:
            return plain
        answer: Mapping[str, Any] | None = _value(plain.json)
    else:
        answer = _calls_or_value(chat, tools, own)
    if answer is None:
        return None
    if reasoning is not None:
        before = reasoning.structural_tag()
        if before is None:
            return plain
        answer = {"type": "sequence", "elements": [before, answer]}
    return GuidedDecodingOptions(structural_tag={"type": "structural_tag", "format": answer})


def _calls_or_value(
    chat: ChatRequest, tools: Sequence[Mapping[str, Any]], own: type[ToolCallParser] | None
) -> Mapping[str, Any] | None:
    if own is None or not tools:
        return None
    schema = chat.value_schema
    calls = own.structural_tag(tools, parallel=chat.parallel, text=schema is None)
    if calls is None or schema is None:
        return calls
    return {"type": "or", "elements": [calls, _value(schema, own.MARKERS)]}


def _value(schema: Any, markers: tuple[str, ...] = ()) -> Mapping[str, Any]:
    """Return a value whose strings do not look like calls."""
    value = {"type": "json_schema", "json_schema": schema}
    return {**value, "excludes": list(markers)} if markers else value
