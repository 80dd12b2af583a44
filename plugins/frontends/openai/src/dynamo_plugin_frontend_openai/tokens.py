"""``POST /tokenize`` and ``/detokenize``: run a model's tokenizer on texts and ids. No worker is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from aiohttp import web
from dynamo_core import DynamoError
from dynamo_generation.answers.render import encode
from dynamo_generation.bodies.decode import to_struct
from dynamo_generation.endpoints.conversation import ChatDependencies
from dynamo_generation.endpoints.endpoint import Exchange, ModelEndpoint, ParsedT
from dynamo_generation.prompts.prompt_budget import PromptBudget
from dynamo_generation.requests import fields
from dynamo_generation.requests.generation_request import U32, invalid
from dynamo_generation.requests.ignored_fields import IgnoredFields
from dynamo_generation.requests.messages import Message
from dynamo_generation.requests.tools import Tool
from dynamo_text import INLINE

from dynamo_plugin_frontend_openai.chat import ParsedChatCompletion

if TYPE_CHECKING:
    from dynamo_core import FrontendServices, Principal, ServedModel, Tokenizer


#: Fields that speak of a conversation, and are those of a chat request.
_OF_CHAT = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


PASSIVE_FIELDS: Mapping[str, fields.Accepts] = {"chat_template": fields.NOTHING, "mm_processor_kwargs": fields.NOTHING}


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
    """Check a request for tokens.

    Raises:
        InvalidArgument: naming the field.
    """
    request = to_struct(raw, TokenizeRequest)
    fields.refuse_fields(raw, TokenizeRequest.__struct_fields__, PASSIVE_FIELDS)
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
    """Return the body of the chat request whose prompt has these tokens."""
    chat = {name: raw[name] for name in ("messages", *_OF_CHAT) if raw.get(name) is not None}
    # The name has found its model already, if there is one.
    return {**chat, "model": request.model or "-"}


def parse_detokenize(raw: dict[str, Any]) -> DetokenizeRequest:
    """Check a request for text.

    Raises:
        InvalidArgument: naming the field.
    """
    request = to_struct(raw, DetokenizeRequest)
    fields.refuse_fields(raw, DetokenizeRequest.__struct_fields__, {})
    return request


class TokenizedText(msgspec.Struct):
    """The tokens; `token_strs` if they were asked for."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(msgspec.Struct):
    """The text."""

    prompt: str


class _OfTokenizer(ModelEndpoint[ParsedT]):
    """A route that needs only the tokenizer of a model, whatever its capabilities."""

    MODEL_TYPE: ClassVar[str] = ""

    def find(self, name: object, principal: Principal) -> ServedModel | DynamoError:
        """Return the model that a body names; without a name the only one, if there is only one."""
        if name is None:
            served = [model for model in self.services.models.list() if principal.allows(model.name)]
            if len(served) == 1:
                return served[0]
            if served:
                return invalid("Several models are served: name one", "model")
        return super().find(name, principal)

    def check_model(self, model: ServedModel) -> None:
        """Check that the model has a tokenizer; whether it has a chat template shows when one is needed."""

    async def answer(self, exchange: Exchange, body: dict[str, Any]) -> web.StreamResponse:
        """Give the client its answer."""
        response = await self.send(exchange, [encode(body)])
        exchange.inflight.succeed(None)
        return response


@dataclass(frozen=True, slots=True)
class ParsedTokenize:
    """A checked request; `chat` is the conversation, if it is of one."""

    request: TokenizeRequest
    chat: ParsedChatCompletion | None


class TokenizeEndpoint(_OfTokenizer[ParsedTokenize]):
    """Tokens of texts and conversations."""

    ENDPOINT = "tokenize"
    BODY = TokenizeRequest
    PASSIVE = PASSIVE_FIELDS

    def __init__(self, services: FrontendServices, ignored: IgnoredFields, chats: ChatDependencies) -> None:
        super().__init__(services, ignored)
        self._chats = chats

    def check(self, raw: dict[str, Any]) -> ParsedTokenize:
        """Check a body."""
        request = parse_tokenize(raw)
        if request.messages is None:
            return ParsedTokenize(request, None)
        return ParsedTokenize(request, ParsedChatCompletion(chat_of_tokenize(request, raw), self._chats))

    async def serve(self, exchange: Exchange, parsed: ParsedTokenize) -> web.StreamResponse:
        """Answer with the tokens."""
        model, request = exchange.model, parsed.request
        if parsed.chat is None:
            special = request.add_special_tokens is not False
            room = PromptBudget(model, "prompt", counted=True)
            tokens = await room.encode(request.prompt or "", add_special_tokens=special)
        else:
            parsed.chat.check_for_tokens()
            tokens = (await parsed.chat.conversation(model, counted=True)).token_ids
        exchange.inflight.prompt_tokens(len(tokens))
        body = {
            "count": len(tokens),
            "max_model_len": model.card.context_length,
            "tokens": tokens,
            "token_strs": await _apart(model.tokenizer, tokens) if request.return_token_strs else None,
        }
        return await self.answer(exchange, body)


class DetokenizeEndpoint(_OfTokenizer[DetokenizeRequest]):
    """Texts of tokens."""

    ENDPOINT = "detokenize"
    BODY = DetokenizeRequest
    PASSIVE: ClassVar[Mapping[str, fields.Accepts]] = {}

    def check(self, raw: dict[str, Any]) -> DetokenizeRequest:
        """Check a body."""
        return parse_detokenize(raw)

    async def serve(self, exchange: Exchange, parsed: DetokenizeRequest) -> web.StreamResponse:
        """Answer with the text, special tokens and all."""
        tokenizer, tokens = exchange.model.tokenizer, parsed.tokens
        size = tokenizer.vocab_size
        unknown = next((index for index, token in enumerate(tokens) if token >= size), None)
        if unknown is not None:
            raise invalid(
                f"Token id {tokens[unknown]} is not in the vocabulary of the model, which has {size} tokens",
                f"tokens[{unknown}]",
            )
        exchange.inflight.prompt_tokens(len(tokens))
        return await self.answer(exchange, {"prompt": await _decoded(tokenizer, tokens)})


async def _decoded(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Return the text; that of very many tokens is made by a thread, so that the loop does not stand still."""
    if len(tokens) <= INLINE:
        return tokenizer.decode(tokens, skip_special_tokens=False)
    return await asyncio.to_thread(tokenizer.decode, tokens, skip_special_tokens=False)


async def _apart(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Return each token as text; bytes that are no text of their own are shown as U+FFFD."""

    def make() -> list[str]:
        return [tokenizer.token_bytes(token).decode(errors="replace") for token in tokens]

    return make() if len(tokens) <= INLINE else await asyncio.to_thread(make)
