"""Answers of the Anthropic API, as events and as one body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamo_generation.answers.content_blocks import Block, BlockRenderer, Kind
from dynamo_generation.answers.render import Collected, Identity, encode, verdict_of
from dynamo_generation.choices.choice import Choice, TokenChoice
from dynamo_generation.requests.opaque_thoughts import pack_thoughts

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'

#: What stands around a text in a delta of each kind of block; before it comes the head of the event.
_DELTAS = {
    Kind.TEXT: b'"delta":{"type":"text_delta","text":"',
    Kind.REASONING: b'"delta":{"type":"thinking_delta","thinking":"',
    Kind.CALL: b'"delta":{"type":"input_json_delta","partial_json":"',
}
_AFTER = b'"}}\n\n'
#: The signature of thoughts that a client can read: a constant, as nothing is verified.
UNSIGNED = pack_thoughts("")


class MessageRenderer(BlockRenderer):
    """Makes the events and the body of one message.

    `prompt_tokens` is what is told before the engine has counted; `edits` whether the client asked for edits of its
    context, of which none are made. Without `thoughts` the text of thinking is only in its signature.
    """

    def __init__(self, identity: Identity, prompt_tokens: int, *, edits: bool = False, thoughts: bool = True) -> None:
        super().__init__(identity)
        self._prompt_tokens = prompt_tokens
        self._edits: dict[str, Any] = {"context_management": {"applied_edits": []}} if edits else {}
        self._verdict: dict[str, Any] = {}
        self._thoughts = thoughts
        self._pinged = False

    def leading_events(self, choice: Choice) -> bytes:
        """Return the beginning of the message; of the text too, if there can be nothing but text."""
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        start = _event("message_start", message=self._message([], None, usage))
        if isinstance(choice, TokenChoice) and choice.plain:
            start += self._written(self._blocks.begin_text())
        return start

    def around(self, choice: Choice) -> tuple[bytes, bytes]:
        """Return what stands around the text of a choice that is nothing but text."""
        return _delta_head(0) + _DELTAS[Kind.TEXT], _AFTER

    def finish(self, choice: Choice) -> bytes:
        """Return the end of the last block. The reason comes with the usage."""
        self._choice = choice
        self._verdict = verdict_of(choice)
        return self._written(self._blocks.end())

    def usage(self, usage: dict[str, Any]) -> bytes:
        """Return the reason, the usage, and the end of the message."""
        more = self._edits | self._verdict
        delta = _event("message_delta", delta=_reason(self._choice), usage=_usage(usage), **more)
        return delta + _event("message_stop")

    def body(self, collected: Sequence[Collected], usage: dict[str, Any], nvext: dict[str, Any] | None) -> list[bytes]:
        """Return the whole message as JSON."""
        self._blocks.end()
        content = [self._whole(block) for block in self._blocks.all]
        choice = collected[0].choice
        return [encode(self._message(content, choice, _usage(usage)) | self._edits | verdict_of(choice))]

    def _message(self, content: list[dict[str, Any]], choice: Choice | None, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._identity.id,
            "type": "message",
            "role": "assistant",
            "model": self._identity.model,
            "content": content,
            **_reason(choice),
            "usage": usage,
        }

    def _begun(self, block: Block) -> bytes:
        start = _event("content_block_start", index=block.index, content_block=_empty(block))
        if self._pinged:
            return start
        self._pinged = True
        return start + _PING

    def _more(self, block: Block, text: str) -> bytes:
        if block.kind is Kind.REASONING and not self._thoughts:
            return b""
        return _delta_head(block.index) + _DELTAS[block.kind] + encode(text)[1:-1] + _AFTER

    def _ended(self, block: Block) -> bytes:
        stop = _event("content_block_stop", index=block.index)
        if block.kind is not Kind.REASONING:
            return stop
        delta = {"type": "signature_delta", "signature": self._signature(block)}
        return _event("content_block_delta", index=block.index, delta=delta) + stop

    def _whole(self, block: Block) -> dict[str, Any]:
        whole = _empty(block)
        match block.kind:
            case Kind.TEXT:
                whole["text"] = block.text
            case Kind.REASONING:
                whole |= {"thinking": block.text if self._thoughts else "", "signature": self._signature(block)}
            case Kind.CALL:
                whole["input"] = block.arguments
        return whole

    def _signature(self, block: Block) -> str:
        """Return a signature, since clients need one.

        It says something only where the thoughts are not told otherwise.
        """
        return UNSIGNED if self._thoughts else pack_thoughts(block.text)


def stop_string(choice: Choice) -> str | None:
    """Return the stop string that ended a choice, if one did; an engine that takes text does not tell."""
    return choice.stop_string if isinstance(choice, TokenChoice) else None


def _reason(choice: Choice | None) -> dict[str, Any]:
    if choice is None:
        return {"stop_reason": None, "stop_sequence": None}
    stopped = stop_string(choice)
    if choice.finish_reason == "stop" and stopped is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stopped}
    return {"stop_reason": _REASONS.get(choice.finish_reason or "stop", "end_turn"), "stop_sequence": None}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the usage; cached tokens of the prompt count apart. No cache was made for a client's sake."""
    told: dict[str, Any] = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
    cached = usage.get("prompt_tokens_details")
    if cached is not None:
        read = cached["cached_tokens"]
        told["input_tokens"] -= read
        told |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": read}
    details = usage.get("completion_tokens_details")
    if details is not None:
        told["output_tokens_details"] = {"thinking_tokens": details["reasoning_tokens"]}
    return told


def _empty(block: Block) -> dict[str, Any]:
    """Return a block as it begins."""
    call = block.call
    if call is not None:
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
    if block.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _delta_head(index: int) -> bytes:
    return b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,' % index


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))
