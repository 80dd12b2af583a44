"""``POST /api/embed`` and the older ``/api/embeddings``."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web
from dynamo_core import EMBED, EmbedRequest
from dynamo_core.errors import NotSupported
from dynamo_core.protocol import EMBEDDINGS
from dynamo_generation.answers.render import encode
from dynamo_generation.endpoints.endpoint import Exchange
from dynamo_generation.prompts.preprocess import Prompt, fitting, text_prompts
from dynamo_generation.prompts.prompt_budget import PromptBudget
from dynamo_generation.requests.generation_request import invalid

from dynamo_plugin_frontend_ollama.conventions import Wording
from dynamo_plugin_frontend_ollama.requests import EMBED_PASSIVE, OllamaEmbeddingsRequest, OllamaEmbedRequest, parse

if TYPE_CHECKING:
    from dynamo_core import ServedModel

_MAX_INPUTS = 2048
#: Numbers of an answer that is made at once, in about a millisecond.
_SMALL = 16 * 1024


@dataclass(frozen=True, slots=True)
class ParsedEmbed:
    """Checked texts to embed; with `cut`, only as much of each as fits."""

    texts: Sequence[str]
    field: str
    ignored: Sequence[str]
    dimensions: int | None = None
    cut: bool = True


class _Embeds(Wording[ParsedEmbed]):
    """Embeds, with engines that do."""

    MODEL_TYPE = EMBEDDINGS
    PASSIVE = EMBED_PASSIVE

    def check_model(self, model: ServedModel) -> None:
        """Check that the engine makes embeddings; the capability counts, whatever else the card says.

        Raises:
            NotSupported: it does not.
        """
        if EMBED not in model.card.capabilities:
            raise NotSupported(f"Model {model.name!r} does not make embeddings")

    async def serve(self, exchange: Exchange, parsed: ParsedEmbed) -> web.StreamResponse:
        """Answer with one vector per text."""
        begun = time.monotonic_ns()
        model, inflight = exchange.model, exchange.inflight
        self._ignored.report(exchange.http, parsed.ignored, self.ENDPOINT)
        model.precheck(exchange.principal)
        prompts = await _prompts(parsed, model)
        tokens = sum(len(prompt.token_ids) for prompt in prompts)
        inflight.prompt_tokens(tokens)
        await exchange.release_body()
        vectors: Sequence[Sequence[float]] = []
        if prompts:
            asked = EmbedRequest(
                model=model.name,
                token_ids=[prompt.token_ids for prompt in prompts],
                dimensions=parsed.dimensions,
                body=_body(model, parsed) if model.card.model_input == "text" else None,
            )
            output = await model.embed(asked, exchange.ctx, exchange.principal)
            vectors, tokens = output.embeddings, output.prompt_tokens or tokens
        spent = time.monotonic_ns() - begun
        told = {"model": model.name, "total_duration": spent, "load_duration": 0, "prompt_eval_count": tokens}
        pieces = self.answer(vectors, told)
        if sum(map(len, vectors)) <= _SMALL:
            response = await self.send(exchange, list(pieces))
        else:
            response = await self.send_in_pieces(exchange, pieces)
        inflight.succeed(None)
        return response

    @abstractmethod
    def answer(self, vectors: Sequence[Sequence[float]], told: dict[str, Any]) -> Iterator[bytes]:
        """Return the answer as JSON, vector by vector."""


class EmbedEndpoint(_Embeds):
    """Embeddings of one or several texts."""

    ENDPOINT = "ollama_embed"
    BODY = OllamaEmbedRequest

    def check(self, raw: dict[str, Any]) -> ParsedEmbed:
        """Check a body."""
        request, left_out = parse(raw, OllamaEmbedRequest, self.PASSIVE, ignore=self._ignored.unknown)
        given = request.input or []
        texts = [given] if isinstance(given, str) else given
        if len(texts) > _MAX_INPUTS:
            raise invalid(f"At most {_MAX_INPUTS} inputs are allowed, got {len(texts)}", "input")
        if request.dimensions is not None and request.dimensions < 1:
            raise invalid(f"Dimensions must be greater than 0, got {request.dimensions}", "dimensions")
        return ParsedEmbed(texts, "input", left_out, request.dimensions, request.truncate is not False)

    def answer(self, vectors: Sequence[Sequence[float]], told: dict[str, Any]) -> Iterator[bytes]:
        """Yield all vectors, and what they took."""
        yield b'{"embeddings":['
        for index, vector in enumerate(vectors):
            yield b"," + encode(vector) if index else encode(vector)
        yield b"]," + encode(told)[1:]


class EmbeddingsEndpoint(_Embeds):
    """The embedding of one text."""

    ENDPOINT = "ollama_embeddings"
    BODY = OllamaEmbeddingsRequest

    def check(self, raw: dict[str, Any]) -> ParsedEmbed:
        """Check a body."""
        request, left_out = parse(raw, OllamaEmbeddingsRequest, self.PASSIVE, ignore=self._ignored.unknown)
        return ParsedEmbed([request.prompt] if request.prompt else [], "prompt", left_out)

    def answer(self, vectors: Sequence[Sequence[float]], told: dict[str, Any]) -> Iterator[bytes]:
        """Yield the vector, empty where there is no text."""
        yield encode({"embedding": vectors[0] if vectors else []})


async def _prompts(parsed: ParsedEmbed, model: ServedModel) -> list[Prompt]:
    limit = model.card.context_length
    if not parsed.cut or limit is None or model.card.model_input == "text":
        return await text_prompts(parsed.texts, model, parsed.field)
    room = PromptBudget(model, parsed.field, counted=True)
    cut = [(await room.encode(text))[: limit - 1] for text in parsed.texts]
    return [fitting(Prompt(token_ids), model, parsed.field) for token_ids in cut]


def _body(model: ServedModel, parsed: ParsedEmbed) -> dict[str, Any]:
    """Return what an engine that takes text is asked, in the form of the OpenAI API."""
    body: dict[str, Any] = {"model": model.name, "input": list(parsed.texts)}
    return body if parsed.dimensions is None else body | {"dimensions": parsed.dimensions}
