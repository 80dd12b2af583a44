"""``POST /v1/score`` and ``POST /v1/rerank``: how well documents answer queries."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from aiohttp import web
from dynamo_core import RERANK, SCORE, BackendError, ScoreOutput, ScoreRequest
from dynamo_core.errors import NotSupported
from dynamo_generation.answers.render import encode
from dynamo_generation.endpoints.endpoint import Exchange, ModelEndpoint, ParsedT
from dynamo_generation.prompts.prompt_room import PromptRoom
from dynamo_generation.requests import end_user, fields

from dynamo_plugin_frontend_openai.scoring_request import (
    PairsRequest,
    ParsedRerank,
    ParsedScoring,
    RerankRequest,
    parse_pairs,
    parse_rerank,
)

if TYPE_CHECKING:
    from dynamo_core import ServedModel


class _Scoring(ModelEndpoint[ParsedT]):
    """What both routes do. The model's card calls what they ask for as the engine's capability is called."""

    PASSIVE = fields.SCORING
    USER = end_user.USER

    def check_model(self, model: ServedModel) -> None:
        """Checks that the engine can do it, whatever else the card says.

        Raises:
            NotSupported: it cannot.
        """
        if self.MODEL_TYPE not in model.card.capabilities:
            raise NotSupported(f"Model {model.name!r} does not serve {self.ENDPOINT}")

    async def scored(self, exchange: Exchange, parsed: ParsedScoring) -> tuple[ScoreOutput, int]:
        """One score per document, and how many tokens the texts had."""
        model, request = exchange.model, parsed.request
        model.precheck(exchange.principal)
        first, second = (PromptRoom(model, name, answer=0) for name in parsed.names)
        most = request.truncate_prompt_tokens
        queries = await first.shorten(parsed.queries, (request.max_tokens_per_query, most))
        documents = await second.shorten(parsed.documents, (request.max_tokens_per_doc, most))
        # For admission and routing. What the model gets, pairs or single texts, the engine makes.
        tokens = await PromptRoom(model, parsed.names[1], counted=True).encode("\n".join([*queries, *documents]))
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
        """Gives the client its answer."""
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
        """Checks a body."""
        return parse_pairs(raw)

    async def serve(self, exchange: Exchange, parsed: ParsedScoring) -> web.StreamResponse:
        """Answers with one score per pair."""
        output, tokens = await self.scored(exchange, parsed)
        data = [{"object": "score", "index": index, "score": score} for index, score in enumerate(output.scores)]
        return await self.answer(exchange, {"object": "list", "created": int(time.time()), "data": data}, tokens)


class RerankEndpoint(_Scoring[ParsedRerank]):
    """Documents sorted by relevance, in the form of the APIs of Jina and Cohere."""

    ENDPOINT = "rerank"
    MODEL_TYPE = RERANK
    BODY = RerankRequest

    async def serve(self, exchange: Exchange, parsed: ParsedRerank) -> web.StreamResponse:
        """Answers with the documents, the most relevant first; equal ones keep their order."""
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
        """Checks a body."""
        return parse_rerank(raw)
