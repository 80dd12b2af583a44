"""``POST /v1/embeddings``."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from sys import byteorder
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from aiohttp import web
from dynamo_core import EMBED, EmbedRequest
from dynamo_core.errors import NotSupported
from dynamo_core.protocol import EMBEDDINGS
from dynamo_generation.answers.render import encode
from dynamo_generation.bodies.decode import NOT_EMPTY, schema_error, to_struct
from dynamo_generation.endpoints.endpoint import Exchange, ModelEndpoint
from dynamo_generation.prompts.preprocess import text_prompts
from dynamo_generation.requests import end_user, fields
from dynamo_generation.requests.completions import PromptInput, split_inputs
from dynamo_generation.requests.generation_request import invalid

if TYPE_CHECKING:
    from dynamo_core import ServedModel


MAX_INPUTS = 2048
ENCODINGS = ("base64", "float")


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """An embedding request."""

    #: Lists whose items `split_inputs` checks.
    ANY_LISTS: ClassVar = ("input",)

    model: Annotated[str, NOT_EMPTY]
    input: Annotated[str | list[Any], NOT_EMPTY]
    encoding_format: str | None = None
    dimensions: Annotated[int, msgspec.Meta(le=2**31 - 1)] | None = None
    user: str | None = None


def parse_embedding(raw: dict[str, Any]) -> tuple[EmbeddingRequest, list[PromptInput]]:
    """Check an embedding request as far as no model is needed for it; also gives its inputs.

    Raises:
        InvalidArgument: naming the field.
    """
    request = to_struct(raw, EmbeddingRequest)
    if request.encoding_format not in (None, *ENCODINGS):
        known = " or ".join(f"'{name}'" for name in ENCODINGS)
        raise schema_error(f"expected {known}, got {request.encoding_format!r} - at `$.encoding_format`")
    inputs = split_inputs(request.input, "input", "Input")
    fields.refuse_fields(raw, EmbeddingRequest.__struct_fields__, {})
    if not request.model.strip():
        raise invalid("Model cannot be empty", "model")
    if len(inputs) > MAX_INPUTS:
        raise invalid(f"At most {MAX_INPUTS} inputs are allowed, got {len(inputs)}", "input")
    if request.dimensions is not None and request.dimensions < 1:
        raise invalid(f"Dimensions must be greater than 0, got {request.dimensions}", "dimensions")
    if request.user is not None and not request.user.strip():
        raise invalid("User ID cannot be empty", "user")
    return request, inputs


class EmbeddingVector(msgspec.Struct):
    """The vector of one input: numbers, or little-endian 32-bit floats in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    """The number of tokens the inputs had."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    """A vector for each input."""

    object: Literal["list"]
    data: list[EmbeddingVector]
    model: str
    usage: EmbeddingUsage


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
    PASSIVE: ClassVar[Mapping[str, fields.Accepts]] = {}
    USER = end_user.USER

    def check(self, raw: dict[str, Any]) -> ParsedEmbedding:
        """Check an embedding body."""
        return ParsedEmbedding(*parse_embedding(raw))

    def check_model(self, model: ServedModel) -> None:
        """Check that the engine makes embeddings; the capability counts, whatever else the card says.

        Raises:
            NotSupported: it does not.
        """
        if EMBED not in model.card.capabilities:
            raise NotSupported(f"Model {model.name!r} does not make embeddings")

    async def serve(self, exchange: Exchange, parsed: ParsedEmbedding) -> web.StreamResponse:
        """Answer with one vector per input."""
        model, request = exchange.model, parsed.request
        model.precheck(exchange.principal)
        prompts = await text_prompts(parsed.inputs, model, "input")
        exchange.inflight.prompt_tokens(sum(len(prompt.token_ids) for prompt in prompts))
        asked = EmbedRequest(
            model=model.name,
            token_ids=[prompt.token_ids for prompt in prompts],
            dimensions=request.dimensions,
            body=exchange.body.raw if model.card.model_input == "text" else None,
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
    """Return a vector as little-endian 32-bit floats in base64."""
    data = array("f", vector)
    if byteorder == "big":
        data.byteswap()
    return base64.b64encode(data.tobytes()).decode()
