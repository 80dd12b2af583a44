"""``POST /v1/embeddings``."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from sys import byteorder
from typing import TYPE_CHECKING, Any

from aiohttp import web
from dynamo_core import EMBED, EmbedRequest
from dynamo_core.errors import NotSupported
from dynamo_core.protocol import EMBEDDINGS
from dynamo_generation.answers.render import encode
from dynamo_generation.endpoints.endpoint import Exchange, ModelEndpoint
from dynamo_generation.prompts.preprocess import text_prompts
from dynamo_generation.requests import end_user, fields
from dynamo_generation.requests.completions import PromptInput

from dynamo_plugin_frontend_openai.embedding_request import EmbeddingRequest, parse_embedding

if TYPE_CHECKING:
    from dynamo_core import ServedModel


#: Numbers of an answer that is made at once, in about a millisecond.
_SMALL = 16 * 1024


@dataclass(frozen=True, slots=True)
class ParsedEmbedding:
    """A checked embedding request and its inputs."""

    request: EmbeddingRequest
    inputs: list[PromptInput]


class EmbeddingEndpoint(ModelEndpoint[ParsedEmbedding]):
    """Embeddings, of engines that make them."""

    ENDPOINT = "embeddings"
    MODEL_TYPE = EMBEDDINGS
    BODY = EmbeddingRequest
    PASSIVE = fields.EMBEDDINGS
    USER = end_user.USER

    def check(self, raw: dict[str, Any]) -> ParsedEmbedding:
        """Checks an embedding body."""
        return ParsedEmbedding(*parse_embedding(raw))

    def check_model(self, model: ServedModel) -> None:
        """Checks that the engine makes embeddings; the capability counts, whatever else the card says.

        Raises:
            NotSupported: it does not.
        """
        if EMBED not in model.card.capabilities:
            raise NotSupported(f"Model {model.name!r} does not make embeddings")

    async def serve(self, exchange: Exchange, parsed: ParsedEmbedding) -> web.StreamResponse:
        """Answers with one vector per input."""
        model, request = exchange.model, parsed.request
        model.precheck(exchange.principal)
        prompts = await text_prompts(parsed.inputs, model, "input")
        exchange.inflight.prompt_tokens(sum(len(prompt.token_ids) for prompt in prompts))
        asked = EmbedRequest(
            model=model.name,
            token_ids=[prompt.token_ids for prompt in prompts],
            dimensions=request.dimensions,
            body=exchange.raw if model.card.model_input == "text" else None,
        )
        await exchange.release_body()
        output = await model.embed(asked, exchange.ctx, exchange.principal)
        tokens = output.prompt_tokens or sum(len(prompt.token_ids) for prompt in prompts)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        body = _body(output.embeddings, {"model": model.name, "usage": usage}, request.encoding_format == "base64")
        if sum(map(len, output.embeddings)) <= _SMALL:
            response = await self.send(exchange, list(body))
        else:
            response = await self.send_in_pieces(exchange, body)
        exchange.inflight.succeed(None)
        return response


def _body(vectors: Sequence[Sequence[float]], more: dict[str, Any], packed: bool) -> Iterator[bytes]:
    """Yield the answer as JSON, vector by vector; `more` stands behind them."""
    yield b'{"object":"list","data":['
    for index, vector in enumerate(vectors):
        entry = {"object": "embedding", "index": index, "embedding": pack(vector) if packed else vector}
        yield b"," + encode(entry) if index else encode(entry)
    yield b"]," + encode(more)[1:]


def pack(vector: Sequence[float]) -> str:
    """A vector as little-endian 32-bit floats in base64."""
    data = array("f", vector)
    if byteorder == "big":
        data.byteswap()
    return base64.b64encode(data.tobytes()).decode()
