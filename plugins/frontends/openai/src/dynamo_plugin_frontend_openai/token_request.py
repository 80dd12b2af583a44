"""Requests for the tokens of a text, and for the text of tokens."""

from __future__ import annotations

from typing import Any

import msgspec
from dynamo_generation.bodies.decode import to_struct
from dynamo_generation.requests import fields
from dynamo_generation.requests.chat import Message
from dynamo_generation.requests.common import U32, invalid
from dynamo_generation.requests.tools import Tool

#: Fields that speak of a conversation, and are those of a chat request.
_OF_CHAT = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A text or a conversation. Without a model the only one that is served is meant."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Token ids. Without a model the only one that is served is meant."""

    model: str | None = None
    tokens: list[U32]


def parse_tokenize(raw: dict[str, Any]) -> TokenizeRequest:
    """Checks a request for tokens.

    Raises:
        InvalidArgument: naming the field.
    """
    request = to_struct(raw, TokenizeRequest)
    fields.check_known(raw, TokenizeRequest.__struct_fields__, fields.TOKENIZE)
    fields.check_passive(raw, fields.TOKENIZE)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("Either prompt or messages must be given, and not both", "prompt")
    if request.messages is None:
        for name in _OF_CHAT:
            if getattr(request, name) is not None:
                raise invalid(f"{name} needs messages", name)
    elif request.add_special_tokens:
        raise invalid("The chat template writes the special tokens itself", "add_special_tokens")
    return request


def chat_of_tokenize(request: TokenizeRequest, raw: dict[str, Any]) -> dict[str, Any]:
    """The body of the chat request whose prompt has these tokens."""
    chat = {name: raw[name] for name in ("messages", *_OF_CHAT) if raw.get(name) is not None}
    # The name has found its model already, if there is one.
    return {**chat, "model": request.model or "-"}


def parse_detokenize(raw: dict[str, Any]) -> DetokenizeRequest:
    """Checks a request for text.

    Raises:
        InvalidArgument: naming the field.
    """
    request = to_struct(raw, DetokenizeRequest)
    fields.check_known(raw, DetokenizeRequest.__struct_fields__, fields.DETOKENIZE)
    return request
