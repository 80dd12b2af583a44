"""Answers of the Responses API, as events and as one body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo_core import Problem
from dynamo_core.protocol import Unreadable
from dynamo_generation.answers.content_blocks import Block, BlockRenderer, Kind
from dynamo_generation.answers.render import Collected, Identity, encode, verdict_of
from dynamo_generation.bodies.decode import object_of
from dynamo_generation.choices.choice import Choice
from dynamo_generation.choices.parsed_choice import is_object
from dynamo_generation.requests.opaque_thoughts import pack_thoughts
from dynamo_generation.requests.tools import FUNCTION

from dynamo_plugin_frontend_responses.tools import CUSTOM, INPUT, NATIVE, ToolIdentity

ID_PREFIX = "resp_"
_ITEM_PREFIXES = {Kind.TEXT: "msg_", Kind.REASONING: "rs_"}
_CALL_PREFIXES = {FUNCTION: "fc_", CUSTOM: "ctc_", **{kind: tool.prefix for kind, tool in NATIVE.items()}}

#: Why an answer is not complete, by the reason that its choice ended for.
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}

_COMPLETED, _IN_PROGRESS, _ENDED_EARLY, _FAILED = "completed", "in_progress", "incomplete", "failed"


class ResponseRenderer(BlockRenderer):
    """Makes the events and the body of one response.

    `echo` is what the response repeats of its request, `called` tells what tools the functions stand for. With
    `packs_reasoning` items of reasoning have an opaque form of it, too.
    """

    def __init__(
        self,
        identity: Identity,
        echo: dict[str, Any],
        called: Mapping[str, ToolIdentity],
        *,
        packs_reasoning: bool = False,
    ) -> None:
        super().__init__(identity)
        self._echo = echo
        self._called = called
        #: Whether the last event is made by `finalized`, and the usage that it tells.
        self.finalizes = False
        self._usage: dict[str, Any] | None = None
        self._packs_reasoning = packs_reasoning
        #: Every event has a number.
        self._count = 0
        #: Of the last item, which alone may have been cut off.
        self._last_status = _IN_PROGRESS

    def leading_events(self, choice: Choice) -> bytes:
        """Return the events that begin the response."""
        return self._opened()

    def around(self, choice: Choice) -> None:
        """Return no fields around a text: the events are numbered."""

    def finish(self, choice: Choice) -> bytes:
        """Return the end of the last item. That of the response comes with the usage."""
        self._finish(choice)
        return self._written(self._blocks.end())

    def usage(self, usage: dict[str, Any]) -> bytes:
        """Return the whole response, unless that is sealed."""
        self._usage = usage
        return b"" if self.finalizes else self.finalized(self.whole())

    def whole(self) -> dict[str, Any]:
        """Return the whole response, once its usage is known."""
        return self._response(self._usage)

    def finalized(self, response: dict[str, Any]) -> bytes:
        """Return the event of the whole response."""
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, problem: Problem) -> bytes:
        """Return the last event of a response that broke."""
        begun = b"" if self._count else self._opened()
        response = self._response(None, _FAILED)
        response["error"] = {"code": "server_error", "message": problem.message}
        return begun + self._event("response.failed", response=response)

    def body(self, collected: Sequence[Collected], usage: dict[str, Any], nvext: dict[str, Any] | None) -> list[bytes]:
        """Return the whole response as JSON."""
        self._finish(collected[0].choice)
        self._blocks.end()
        self._usage = usage
        return [encode(self.whole())]

    def _opened(self) -> bytes:
        response = self._response(None, _IN_PROGRESS)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _finish(self, choice: Choice) -> None:
        self._choice = choice
        self._last_status = _ENDED_EARLY if choice.finish_reason in _INCOMPLETE else _COMPLETED

    def _response(self, usage: dict[str, Any] | None, status: str | None = None) -> dict[str, Any]:
        """Return the response as it is now."""
        reason = None if self._choice is None else _INCOMPLETE.get(self._choice.finish_reason or "")
        return {
            "id": self._identity.id,
            "object": "response",
            "created_at": self._identity.created,
            "status": status or self._last_status,
            "error": None,
            "incomplete_details": None if reason is None else {"reason": reason},
            "model": self._identity.model,
            "output": [self._item(block) for block in self._blocks.all],
            **self._echo,
            "usage": None if usage is None else _usage(usage),
            **({} if self._choice is None else verdict_of(self._choice)),
        }

    def _begun(self, block: Block) -> bytes:
        if self._kind(block) in NATIVE:
            # What such an item must hold is not known before the end.
            return b""
        item = self._shape(block, _IN_PROGRESS, None)
        added = self._added(block, item)
        if block.kind is Kind.CALL:
            return added
        return added + self._of_part("response.content_part.added", block, part=_part(block.kind, ""))

    def _more(self, block: Block, text: str) -> bytes:
        match block.kind:
            case Kind.TEXT:
                return self._of_part("response.output_text.delta", block, delta=text, logprobs=[])
            case Kind.REASONING:
                return self._of_part("response.reasoning_text.delta", block, delta=text)
            case Kind.CALL if self._kind(block) == FUNCTION:
                return self._of_item("response.function_call_arguments.delta", block, delta=text)
            case Kind.CALL:
                # The arguments are JSON around what the client is told: it is there when they are whole.
                return b""

    def _ended(self, block: Block) -> bytes:
        text = block.text
        match block.kind:
            case Kind.TEXT:
                done = self._of_part("response.output_text.done", block, text=text, logprobs=[])
            case Kind.REASONING:
                done = self._of_part("response.reasoning_text.done", block, text=text)
            case Kind.CALL:
                done = self._called_whole(block, text)
        if block.kind is not Kind.CALL:
            done += self._of_part("response.content_part.done", block, part=_part(block.kind, text))
        return done + self._event("response.output_item.done", output_index=block.index, item=self._item(block))

    def _called_whole(self, block: Block, text: str) -> bytes:
        """Return what comes before the end of the item of a call, `text` being its arguments."""
        item = self._shape(block, _IN_PROGRESS, text)
        match item["type"]:
            case "function_call":
                begun = b""
                if self._kind(block) in NATIVE:
                    begun = self._added(block, item | {"arguments": ""})
                    begun += self._of_item("response.function_call_arguments.delta", block, delta=text)
                name = item["name"]
                return begun + self._of_item("response.function_call_arguments.done", block, name=name, arguments=text)
            case "custom_tool_call":
                delta = self._of_item("response.custom_tool_call_input.delta", block, delta=item["input"])
                return delta + self._of_item("response.custom_tool_call_input.done", block, input=item["input"])
            case _:
                return self._added(block, item)

    def _added(self, block: Block, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", output_index=block.index, item=item)

    def _item(self, block: Block) -> dict[str, Any]:
        """Return an item as it is now.

        Only the last can still be growing, or have been cut off, but any call can break.
        """
        last, text = block is self._blocks.all[-1], block.text
        status = self._last_status if last else _COMPLETED
        if status == _COMPLETED and block.call is not None and not is_object(text or "{}"):
            status = _ENDED_EARLY
        return self._shape(block, status, text)

    def _shape(self, block: Block, status: str, text: str | None) -> dict[str, Any]:
        """Return an item; without `text` as it begins, with no content."""
        item: dict[str, Any] = {"id": self._id(block), "status": status}
        call = block.call
        if call is not None:
            return item | {"call_id": call.id, **self._call(call.name, text)}
        content = [] if text is None else [_part(block.kind, text)]
        if block.kind is Kind.REASONING:
            opaque = {"encrypted_content": pack_thoughts(text)} if self._packs_reasoning and text is not None else {}
            return item | {"type": "reasoning", "summary": [], "content": content, **opaque}
        return item | {"type": "message", "role": "assistant", "content": content}

    def _call(self, name: str, text: str | None) -> dict[str, Any]:
        """Return the fields of a call of a function: as a call of its tool, if the arguments fit that tool.

        `text` is the arguments, None as long as there are none.
        """
        called = self._called.get(name) or ToolIdentity(FUNCTION, name)
        namespace = {} if called.namespace is None else {"namespace": called.namespace}
        if called.type == CUSTOM:
            value = None if text is None else _object(text).get(INPUT)
            return {
                "type": "custom_tool_call",
                "name": called.name,
                "input": value if isinstance(value, str) else text or "",
                **namespace,
            }
        native = NATIVE.get(called.type)
        if native is not None:
            given = _object(text or "")
            if all(field in given for field in native.required):
                return {"type": native.item, native.key: {**native.always, **given}}
        return {"type": "function_call", "name": called.name, "arguments": text or "", **namespace}

    def _kind(self, block: Block) -> str | None:
        """Return the type of the tool that a call is of; None for a part that is no call."""
        if block.call is None:
            return None
        called = self._called.get(block.call.name)
        return FUNCTION if called is None else called.type

    def _id(self, block: Block) -> str:
        """Return the request's own id in another form: unlike a random one it is found in the log."""
        kind = self._kind(block)
        prefix = _ITEM_PREFIXES[block.kind] if kind is None else _CALL_PREFIXES[kind]
        return f"{prefix}{self._identity.id.removeprefix(ID_PREFIX)}-{block.index}"

    def _of_part(self, kind: str, block: Block, **fields: Any) -> bytes:
        return self._of_item(kind, block, content_index=0, **fields)

    def _of_item(self, kind: str, block: Block, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._id(block), output_index=block.index, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._count = self._count, self._count + 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, "sequence_number": number, **fields}))


def _object(text: str) -> dict[str, Any]:
    """Return the arguments of a call; empty if they are not an object, as when the limit of tokens cut them off."""
    try:
        return object_of(text)
    except Unreadable:
        return {}


def _part(kind: Kind, text: str) -> dict[str, Any]:
    if kind is Kind.REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the usage; what is not known is 0, as the API has no place for less."""
    reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage["total_tokens"],
    }
