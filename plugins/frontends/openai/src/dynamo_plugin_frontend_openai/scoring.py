"""``POST /v1/score`` and ``POST /v1/rerank``: score documents against queries."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from aiohttp import web
from dynamo_core import RERANK, SCORE, BackendError, ScoreOutput, ScoreRequest
from dynamo_core.errors import NotSupported
from dynamo_generation.answers.render import encode
from dynamo_generation.bodies.decode import NOT_EMPTY, to_struct
from dynamo_generation.endpoints.endpoint import Exchange, ModelEndpoint, ParsedT
from dynamo_generation.prompts.prompt_budget import PromptBudget
from dynamo_generation.requests import end_user, fields
from dynamo_generation.requests.generation_request import invalid
from msgspec import UNSET, UnsetType

from dynamo_plugin_frontend_openai.embeddings import EmbeddingUsage

if TYPE_CHECKING:
    from dynamo_core import ServedModel


#: The names that clients have for the queries and the documents of a score request.
NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))

_INT = msgspec.Meta(le=2**31 - 1)


#: Of scores and sorted documents, as clients of vLLM, Jina and Cohere send them.
PASSIVE_FIELDS: Mapping[str, fields.Accepts] = {
    "activation": fields.OneOf(None, True),
    "add_special_tokens": fields.OneOf(None, True),
    "cache_salt": fields.NOTHING,
    "chat_template_kwargs": fields.OneOf(None, {}),
    "encoding_format": fields.OneOf(None, "float"),
    "instruction": fields.NOTHING,
    "max_chunks_per_doc": fields.NOTHING,
    "mm_processor_kwargs": fields.OneOf(None, {}),
    "priority": fields.OneOf(None, 0),
    "rank_fields": fields.OneOf(None, [], ["text"]),  # a document has no other field
    "request_id": fields.NOTHING,  # the header x-request-id does it
    "return_embeddings": fields.OneOf(None, False),
    "truncation_side": fields.OneOf(None, "right"),
    "use_activation": fields.OneOf(None, True),
}


class TextItem(msgspec.Struct, forbid_unknown_fields=True):
    """A text as an object."""

    text: str


OneText: TypeAlias = str | TextItem
Texts: TypeAlias = Annotated[str | TextItem | list[str | TextItem], NOT_EMPTY]


class ScoringRequest(msgspec.Struct, kw_only=True):
    """The fields that both kinds of request have. A limit of 0 is none."""

    model: Annotated[str, NOT_EMPTY]
    max_tokens_per_query: Annotated[int, _INT] | None = None
    max_tokens_per_doc: Annotated[int, _INT] | None = None
    truncate_prompt_tokens: Annotated[int, _INT] | None = None
    user: str | None = None


class PairsRequest(ScoringRequest, kw_only=True):
    """Queries and documents, under one of several pairs of names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None


class RerankRequest(ScoringRequest, kw_only=True):
    """A query and the documents to be sorted. A `top_n` of 0 means all."""

    query: Annotated[OneText, NOT_EMPTY]
    documents: Texts
    top_n: Annotated[int, _INT] | None = None
    return_documents: bool | None = None


RequestT = TypeVar("RequestT", bound=ScoringRequest)


@dataclass(frozen=True, slots=True)
class ParsedScoring:
    """A checked request and its texts: one query, or as many as there are documents.

    `names` are the fields that they were in.
    """

    request: ScoringRequest
    names: tuple[str, str]
    queries: list[str]
    documents: list[str]


@dataclass(frozen=True, slots=True)
class ParsedRerank(ParsedScoring):
    """A checked request for sorted documents."""

    request: RerankRequest


def parse_pairs(raw: dict[str, Any]) -> ParsedScoring:
    """Check a request for scores as far as no model is needed for it.

    Raises:
        InvalidArgument: naming the field.
    """
    request = _checked(raw, PairsRequest)
    given = {name for name in _TEXT_FIELDS if getattr(request, name) is not None}
    names = next((names for names in NAMES if given == set(names)), None)
    if names is None:
        known = "; ".join(" and ".join(names) for names in NAMES)
        raise invalid(f"Exactly two fields with texts must be given: {known}", min(given, default=NAMES[0][0]))
    queries, documents = (_texts(getattr(request, name), name) for name in names)
    if len(queries) not in (1, len(documents)):
        raise invalid(
            f"{names[0]} must hold one text, or as many as {names[1]}: got {len(queries)} and {len(documents)}",
            names[0],
        )
    return ParsedScoring(request, names, queries, documents)


def parse_rerank(raw: dict[str, Any]) -> ParsedRerank:
    """Check a request for sorted documents as far as no model is needed for it.

    Raises:
        InvalidArgument: naming the field.
    """
    request = _checked(raw, RerankRequest)
    if request.top_n is not None and request.top_n < 0:
        raise invalid(f"top_n must be at least 0, got {request.top_n}", "top_n")
    names = ("query", "documents")
    return ParsedRerank(request, names, *(_texts(getattr(request, name), name) for name in names))


_TEXT_FIELDS = tuple(dict.fromkeys(name for names in NAMES for name in names))


def _checked(raw: dict[str, Any], cls: type[RequestT]) -> RequestT:
    request = to_struct(raw, cls)
    fields.refuse_fields(raw, cls.__struct_fields__, PASSIVE_FIELDS)
    if not request.model.strip():
        raise invalid("Model cannot be empty", "model")
    for name in ("max_tokens_per_query", "max_tokens_per_doc"):
        value = getattr(request, name)
        if value is not None and value < 0:
            raise invalid(f"{name} must be at least 0, got {value}", name)
    wish = request.truncate_prompt_tokens
    if wish is not None and wish < 1 and wish != -1:
        raise invalid(f"truncate_prompt_tokens must be at least 1, or -1, got {wish}", "truncate_prompt_tokens")
    if request.user is not None and not request.user.strip():
        raise invalid("User ID cannot be empty", "user")
    return request


def _texts(value: OneText | list[OneText], field: str) -> list[str]:
    items = value if isinstance(value, list) else [value]
    if not items:
        raise invalid(f"{field} must hold at least one text", field)
    texts = [item if isinstance(item, str) else item.text for item in items]
    for index, text in enumerate(texts):
        if not text:
            where = f"{field}[{index}]" if isinstance(value, list) else field
            raise invalid(f"{where} cannot be empty", where)
    return texts


class TextScore(msgspec.Struct):
    """The score of one pair."""

    object: Literal["score"]
    index: int
    score: float


class ScoreList(msgspec.Struct):
    """A score for each document."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[TextScore]
    usage: EmbeddingUsage


class RankedText(msgspec.Struct):
    """A document, as it was given."""

    text: str


class RankedDocument(msgspec.Struct):
    """The place of a document in the request, and its score."""

    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class RankedList(msgspec.Struct):
    """Documents, the most relevant first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


class _Scoring(ModelEndpoint[ParsedT]):
    """The base of both routes. The model's card names the capability as the engine does."""

    PASSIVE = PASSIVE_FIELDS
    USER = end_user.USER

    def check_model(self, model: ServedModel) -> None:
        """Check that the engine can do it, whatever else the card says.

        Raises:
            NotSupported: it cannot.
        """
        if self.MODEL_TYPE not in model.card.capabilities:
            raise NotSupported(f"Model {model.name!r} does not serve {self.ENDPOINT}")

    async def scored(self, exchange: Exchange, parsed: ParsedScoring) -> tuple[ScoreOutput, int]:
        """Return one score per document, and how many tokens the texts had."""
        model, request = exchange.model, parsed.request
        model.precheck(exchange.principal)
        first, second = (PromptBudget(model, name, answer=0) for name in parsed.names)
        most = request.truncate_prompt_tokens
        queries = await first.shorten(parsed.queries, (request.max_tokens_per_query, most))
        documents = await second.shorten(parsed.documents, (request.max_tokens_per_doc, most))
        # For admission and routing. What the model gets, pairs or single texts, the engine makes.
        tokens = await PromptBudget(model, parsed.names[1], counted=True).encode("\n".join([*queries, *documents]))
        exchange.inflight.prompt_tokens(len(tokens))
        await exchange.release_body()
        output = await model.score(
            ScoreRequest(
                model=model.name,
                queries=queries,
                documents=documents,
                max_tokens_per_query=request.max_tokens_per_query or None,
                max_tokens_per_doc=request.max_tokens_per_doc or None,
                truncate_prompt_tokens=request.truncate_prompt_tokens,
            ),
            tokens,
            exchange.ctx,
            exchange.principal,
        )
        if len(output.scores) != len(parsed.documents):
            raise BackendError.Unknown(
                f"the worker gave {len(output.scores)} scores for {len(parsed.documents)} documents"
            )
        return output, output.prompt_tokens or len(tokens)

    async def answer(self, exchange: Exchange, body: dict[str, Any], tokens: int) -> web.StreamResponse:
        """Give the client its answer."""
        body = {
            "id": f"{self.ENDPOINT}-{exchange.inflight.request_id}",
            "model": exchange.model.name,
            **body,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        response = await self.send(exchange, [encode(body)])
        exchange.inflight.succeed(None)
        return response


class ScoreEndpoint(_Scoring[ParsedScoring]):
    """Scores of pairs, in the form of vLLM's API."""

    ENDPOINT = "score"
    MODEL_TYPE = SCORE
    BODY = PairsRequest

    def check(self, raw: dict[str, Any]) -> ParsedScoring:
        """Check a body."""
        return parse_pairs(raw)

    async def serve(self, exchange: Exchange, parsed: ParsedScoring) -> web.StreamResponse:
        """Answer with one score per pair."""
        output, tokens = await self.scored(exchange, parsed)
        data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(output.scores)]
        return await self.answer(exchange, {"object": "list", "created": int(time.time()), "data": data}, tokens)


class RerankEndpoint(_Scoring[ParsedRerank]):
    """Documents sorted by relevance, in the form of the APIs of Jina and Cohere."""

    ENDPOINT = "rerank"
    MODEL_TYPE = RERANK
    BODY = RerankRequest

    async def serve(self, exchange: Exchange, parsed: ParsedRerank) -> web.StreamResponse:
        """Answer with the documents, the most relevant first; equal ones keep their order."""
        output, tokens = await self.scored(exchange, parsed)
        scores, request = output.scores, parsed.request
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
        results: list[dict[str, Any]] = []
        for index in order[: request.top_n or None]:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if request.return_documents is not False:
                result["document"] = {"text": parsed.documents[index]}
            results.append(result)
        return await self.answer(exchange, {"results": results}, tokens)

    def check(self, raw: dict[str, Any]) -> ParsedRerank:
        """Check a body."""
        return parse_rerank(raw)
