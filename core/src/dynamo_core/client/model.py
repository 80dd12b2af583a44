"""One served model: its pools, its tokenizer, and the way into the pipeline."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo_core.client.pipeline import Pipeline
from dynamo_core.client.pool import Pool
from dynamo_core.client.stream import ResponseStream
from dynamo_core.contracts.admission import Principal
from dynamo_core.contracts.context import EngineContext
from dynamo_core.contracts.endpoints import EMBED
from dynamo_core.contracts.engine import EMBED as EMBED_CAPABILITY
from dynamo_core.contracts.router import Router
from dynamo_core.errors import DynamoError, NotSupported, StreamIncomplete
from dynamo_core.protocol.records import ModelCard
from dynamo_core.protocol.request import EmbedOutput, EmbedRequest, PreprocessedRequest
from dynamo_core.text.tokenizer import Tokenizer


class Model:
    """See `dynamo_core.contracts.frontend.ServedModel`."""

    def __init__(
        self,
        card: ModelCard,
        *,
        tokenizer: Tokenizer,
        files: Mapping[str, bytes],
        pool: Pool,
        router: Router,
        pipeline: Pipeline,
    ) -> None:
        self.name = card.name
        self.card = card
        self.tokenizer = tokenizer
        self.pool = pool
        self.router = router
        self._files = files
        self._pipeline = pipeline

    @property
    def instance_count(self) -> int:
        """How many workers serve it."""
        return len(self.pool.instances)

    def file(self, name: str) -> bytes | None:
        """A file of the model folder; None if the card does not list it."""
        return self._files.get(name)

    def precheck(self, principal: Principal) -> None:
        """Raises `ServiceOverloaded` if a request would be refused anyway."""
        self._pipeline.admission.precheck(self.name, principal, [self.pool])

    async def generate(self, request: PreprocessedRequest, ctx: EngineContext, principal: Principal) -> ResponseStream:
        """Admits, routes and starts a request; returns once a worker has accepted it. The caller closes the stream."""
        return await self._pipeline.generate(request, ctx, principal, self.pool, self.router)

    async def embed(self, request: EmbedRequest, ctx: EngineContext, principal: Principal) -> EmbedOutput:
        """Embeds; see `ServedModel.embed`."""
        if EMBED_CAPABILITY not in self.card.capabilities:
            raise NotSupported(f"model {self.name!r} does not make embeddings")
        routed_by = PreprocessedRequest(
            model=request.model, token_ids=[token for tokens in request.token_ids for token in tokens]
        )
        permit = await self._pipeline.admission.admit(routed_by, principal, [self.pool])
        stream = await self._pipeline.open(EMBED, request, routed_by, ctx, self.pool, self.router, permit)
        try:
            async for output in stream:
                if isinstance(output, EmbedOutput):
                    return output
            raise StreamIncomplete("the worker gave no embeddings")
        finally:
            await stream.aclose()


def card_conflict(known: ModelCard, new: ModelCard) -> DynamoError | None:
    """Why a worker with card `new` cannot serve the model described by `known`; None if it can."""
    if new.checksum != known.checksum:
        return DynamoError(
            f"its card has checksum {new.checksum[:12]}, the workers before it {known.checksum[:12]}: "
            "tokenizer, template or engine settings differ"
        )
    return None
