"""The messages of a conversation, and all that has to be known of them, found out in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from dynamo_core.errors import InvalidArgument

from dynamo_generation.bodies.bounds import INLINE, ArgumentBounds
from dynamo_generation.bodies.decode import schema_error
from dynamo_generation.requests.generation_request import invalid
from dynamo_generation.requests.tools import ToolCall

ROLES = ("developer", "system", "user", "assistant", "tool", "function")

#: Messages, or parts of one, that a template takes about a millisecond for.
_MANY = 256


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message. Only parts of type ``text`` reach engines that take tokens."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """The fields of a message that are checked; templates see the message as the client sent it."""

    role: Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(ROLES)})]
    content: str | list[ContentPart] | None = None
    tool_calls: list[ToolCall] | None = None


class MessageReview:
    """The findings of one pass over messages."""

    __slots__ = ("_arguments", "call_ids", "fault", "parts", "refusal", "size")

    def __init__(self) -> None:
        #: The first message without the content that it needs.
        self.fault: InvalidArgument | None = None
        #: The refusal of the first content that is no text, or of the first call that is of no function.
        self.refusal: InvalidArgument | None = None
        self.call_ids: list[str] = []
        #: Characters of contents and arguments, and the most parts of a message.
        self.size = 0
        self.parts = 0
        self._arguments = ArgumentBounds()

    def look_at(self, message: Message, index: int) -> None:
        """Look at the next message."""
        if message.role not in ROLES:
            known = ", ".join(f"`{role}`" for role in ROLES)
            raise schema_error(
                f"unknown role {message.role!r}, expected one of {known} - at `$.messages[{index}].role`"
            )
        if message.tool_calls is not None:
            self._look_at_calls(message.tool_calls, index)
        content = message.content
        if isinstance(content, str):
            self.size += len(content)
        elif content is not None:
            self._look_at_parts(content, index)
        elif self.fault is None and message.role != "assistant":
            self.fault = invalid(f"The message of role '{message.role}' has no content", f"messages[{index}].content")

    def _look_at_calls(self, calls: Sequence[ToolCall], index: int) -> None:
        for number, call in enumerate(calls):
            if call.id is not None:
                self.call_ids.append(call.id)
            if call.function is None:
                self.refusal = self.refusal or invalid(
                    "Only calls of functions are supported by this model",
                    f"messages[{index}].tool_calls[{number}].function",
                )
            elif isinstance(call.function.arguments, str):
                self.size += len(call.function.arguments)
                self._arguments.add(call.function.arguments, index, number)

    def _look_at_parts(self, parts: Sequence[ContentPart], index: int) -> None:
        self.parts = max(self.parts, len(parts))
        for number, part in enumerate(parts):
            self.size += len(part.text or "")
            if part.type != "text":
                self.refusal = self.refusal or invalid(
                    f"Content of type '{part.type}' is not supported by this model",
                    f"messages[{index}].content[{number}].type",
                )
            elif part.text is None:
                self.fault = self.fault or invalid(
                    "A text part has no text", f"messages[{index}].content[{number}].text"
                )


def review(messages: Sequence[Message]) -> MessageReview:
    """Look at all messages.

    Raises:
        InvalidArgument: a role is not known, or arguments lead out of bounds.
    """
    found = MessageReview()
    for index, message in enumerate(messages):
        found.look_at(message, index)
    return found


def is_long(messages: Sequence[Message], found: MessageReview) -> bool:
    """Return whether a template takes so long for messages that a thread should render it."""
    return len(messages) > _MANY or found.parts > _MANY or found.size > INLINE
