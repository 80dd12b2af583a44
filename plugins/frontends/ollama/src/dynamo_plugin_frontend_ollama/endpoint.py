"""``POST /api/chat`` and ``/api/generate``: answers to conversations and to prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from aiohttp import web
from dynamo_core.errors import ModelNotFound
from dynamo_core.protocol import CHAT, COMPLETIONS
from dynamo_generation.answers.framing import LINES
from dynamo_generation.answers.render import Identity, encode
from dynamo_generation.bodies.reading import Body
from dynamo_generation.endpoints.conversation import ChatDependencies, ConversationEndpoint
from dynamo_generation.endpoints.endpoint import Exchange
from dynamo_generation.endpoints.parsed_request import ParsedRequest
from dynamo_generation.endpoints.translated_request import TranslatedRequest, told_as
from dynamo_generation.prompts.preprocess import Prompt, text_prompts
from dynamo_generation.requests.completions import parse_completion
from dynamo_generation.requests.generation_request import invalid

from dynamo_plugin_frontend_ollama import render
from dynamo_plugin_frontend_ollama.conventions import Wording, body_of
from dynamo_plugin_frontend_ollama.render import LineRenderer, Shape, moment
from dynamo_plugin_frontend_ollama.requests import (
    CHAT_PASSIVE,
    GENERATE_PASSIVE,
    OllamaChatRequest,
    OllamaGenerateRequest,
    check_generate,
    parse,
)
from dynamo_plugin_frontend_ollama.to_chat import (
    CHAT_NAMES,
    GENERATE_NAMES,
    chat_of_messages,
    chat_of_prompt,
    completion_of_prompt,
)

if TYPE_CHECKING:
    from dynamo_core import ServedModel


class ParsedConversation(TranslatedRequest):
    """A checked request that is answered by chatting. `loads` is the answer to an empty one."""

    NAMES = CHAT_NAMES
    SHAPE: ClassVar[Shape] = render.CHAT

    def __init__(self, chat: dict[str, Any], chats: ChatDependencies, ignored: Sequence[str], loads: str = "") -> None:
        self._begun = time.monotonic_ns()
        super().__init__(chat, chats)
        self.ignored = ignored
        self.loads = loads

    def check_for_tokens(self) -> None:
        """Refuse pictures, which are all that makes a content more than text, in the words of this API."""
        if any(isinstance(message.content, list) for message in self.chat.messages):
            raise invalid("images are not supported by this model", "images")
        super().check_for_tokens()

    def renderer(self, identity: Identity, prompts: Sequence[Prompt], model: ServedModel) -> LineRenderer:
        """Return lines and bodies of Ollama's API."""
        return LineRenderer(identity, self.SHAPE, self._begun)


class ParsedPrompt(ParsedRequest):
    """A checked request that is answered by completing a text."""

    NAMES: ClassVar[Mapping[str, str]] = GENERATE_NAMES
    loads = ""

    def __init__(self, completion: dict[str, Any], ignored: Sequence[str]) -> None:
        self._begun = time.monotonic_ns()
        with told_as(self.NAMES):
            checked = parse_completion(completion)
        self._inputs = checked.prompts
        super().__init__(completion, checked.request)
        self.ignored = ignored

    async def prompts(self, model: ServedModel) -> list[Prompt]:
        """Return the prompt as it is."""
        return await text_prompts(self._inputs, model, "prompt")

    def renderer(self, identity: Identity, prompts: Sequence[Prompt], model: ServedModel) -> LineRenderer:
        """Return lines and bodies of Ollama's API."""
        return LineRenderer(identity, render.GENERATE, self._begun)


class ParsedGenerate(ParsedConversation):
    """A checked request whose prompt is a user's message; `plain` makes it one without a chat template."""

    NAMES = GENERATE_NAMES
    SHAPE = render.GENERATE

    def __init__(
        self, request: OllamaGenerateRequest, chats: ChatDependencies, ignored: Sequence[str], loads: str
    ) -> None:
        super().__init__(chat_of_prompt(request), chats, ignored, loads)
        self.plain: Callable[[], ParsedPrompt] = lambda: ParsedPrompt(completion_of_prompt(request), ignored)


Parsed: TypeAlias = ParsedConversation | ParsedPrompt


class _Answers(Wording[Parsed], ConversationEndpoint[Parsed]):
    """Answers with lines of JSON, unless the client wants one body."""

    MODEL_TYPE = CHAT
    ID_PREFIX = ""
    DONE = b""
    FRAMING = LINES
    #: What an answer that says nothing has in place of the message.
    EMPTY: ClassVar[Mapping[str, Any]]

    async def read(self, http: web.Request) -> Body:
        """Return the body. An answer is streamed unless the client says otherwise."""
        body = await body_of(http)
        if body.raw.get("stream") is None:
            body.raw["stream"] = True
        return body

    async def serve(self, exchange: Exchange, parsed: Parsed) -> web.StreamResponse:
        """Answer; a request that asks nothing is one to load a model, which is there already."""
        if not parsed.loads:
            return await super().serve(exchange, parsed)
        head = {"model": exchange.model.name, "created_at": moment(time.time())}
        body = encode({**head, **self.EMPTY, "done": True, "done_reason": parsed.loads})
        response = await self.send(exchange, [body])
        exchange.inflight.succeed(None)
        return response


class ChatEndpoint(_Answers):
    """Answers conversations."""

    ENDPOINT = "ollama_chat"
    BODY = OllamaChatRequest
    PASSIVE = CHAT_PASSIVE
    EMPTY: ClassVar[Mapping[str, Any]] = {"message": {"role": "assistant", "content": ""}}

    def check(self, raw: dict[str, Any]) -> Parsed:
        """Check a body."""
        request, left_out = parse(raw, OllamaChatRequest, self.PASSIVE, ignore=self._ignored.unknown)
        loads = "" if request.messages else _loads(raw)
        return ParsedConversation(chat_of_messages(request), self._chats, left_out, loads)


class GenerateEndpoint(_Answers):
    """Answers prompts."""

    ENDPOINT = "ollama_generate"
    BODY = OllamaGenerateRequest
    PASSIVE = GENERATE_PASSIVE
    EMPTY: ClassVar[Mapping[str, Any]] = {"response": ""}

    def check(self, raw: dict[str, Any]) -> Parsed:
        """Check a body."""
        request, left_out = parse(raw, OllamaGenerateRequest, self.PASSIVE, ignore=self._ignored.unknown)
        check_generate(request)
        if request.raw and request.prompt:
            return ParsedPrompt(completion_of_prompt(request), left_out)
        return ParsedGenerate(request, self._chats, left_out, "" if request.prompt else _loads(raw))

    def check_model(self, model: ServedModel) -> None:
        """Check that the model can be asked for answers of any kind."""
        if COMPLETIONS not in model.card.model_types:
            super().check_model(model)

    async def serve(self, exchange: Exchange, parsed: Parsed) -> web.StreamResponse:
        """Answer by chatting if the model can, and the prompt is not raw."""
        types = exchange.model.card.model_types
        if isinstance(parsed, ParsedGenerate) and CHAT not in types:
            parsed = parsed.plain()
        elif isinstance(parsed, ParsedPrompt) and COMPLETIONS not in types:
            raise ModelNotFound(f"Model not found: {exchange.model.name!r} does not serve raw prompts")
        return await super().serve(exchange, parsed)


def _loads(raw: Mapping[str, Any]) -> str:
    """Return what a request is for that asks nothing."""
    return "unload" if raw.get("keep_alive") in (0, "0", "0s") else "load"
