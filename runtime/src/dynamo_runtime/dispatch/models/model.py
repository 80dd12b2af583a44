"""One served model: its workers by role, its tokenizer, and its entry into the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from dynamo_core.contracts.admission import Permit
from dynamo_core.contracts.engine import EMBED as EMBED_CAPABILITY
from dynamo_core.contracts.engine import RERANK
from dynamo_core.contracts.engine import SCORE as SCORE_CAPABILITY
from dynamo_core.contracts.parsers import NO_PARSERS, Parsers
from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.contracts.requests.explain import RouteView
from dynamo_core.contracts.requests.principal import ANONYMOUS, Principal
from dynamo_core.contracts.tokenizer import Tokenizer
from dynamo_core.contracts.transports.call import EMBED, SCORE, Endpoint
from dynamo_core.errors import DynamoError, NotSupported, StreamIncomplete, Unavailable
from dynamo_core.protocol.records import AGGREGATED, DECODE, PREFILL, Instance, ModelCard
from dynamo_core.protocol.request import EmbedOutput, EmbedRequest, PreprocessedRequest, ScoreOutput, ScoreRequest

from dynamo_runtime.dispatch.execution.pipeline import Pipeline
from dynamo_runtime.dispatch.execution.response_stream import ResponseStream
from dynamo_runtime.dispatch.pools.explain import explain_group
from dynamo_runtime.dispatch.pools.worker_group import RoutePlan, WorkerGroup


class Model:
    """See `dynamo_core.contracts.frontend.ServedModel`.

    A group is there while it has workers. Aggregated workers answer alone; decode workers answer together with prefill
    workers. Where both are there a request takes the plan with fewer requests per answering worker.
    """

    def __init__(
        self,
        card: ModelCard,
        *,
        tokenizer: Tokenizer,
        files: Mapping[str, bytes],
        pipeline: Pipeline,
        successor: Callable[[str], Model | None],
        parsers: Parsers = NO_PARSERS,
    ) -> None:
        """`successor` finds the model that has this name now, this one or another that came after it."""
        self.name = card.name
        self.card = card
        self.tokenizer = tokenizer
        self.parsers = parsers
        self._files = files
        self._pipeline = pipeline
        self._successor = successor
        self._groups: dict[str, WorkerGroup] = {}
        # As they are looked at for every request.
        self._aggregated: WorkerGroup | None = None
        self._decode: WorkerGroup | None = None
        self._prefill: WorkerGroup | None = None

    # The groups.

    @property
    def groups(self) -> Mapping[str, WorkerGroup]:
        """The workers by role."""
        return self._groups

    def add(self, group: WorkerGroup) -> None:
        """Add workers of a role."""
        self._groups[group.pool.role] = group
        self._changed()

    def remove(self, role: str) -> WorkerGroup:
        """Remove workers that are gone."""
        group = self._groups.pop(role)
        self._changed()
        return group

    def _changed(self) -> None:
        groups = self._groups
        self._aggregated, self._decode, self._prefill = groups.get(AGGREGATED), groups.get(DECODE), groups.get(PREFILL)

    @property
    def answers(self) -> bool:
        """Whether there are workers of a role that answers clients."""
        return self._aggregated is not None or self._decode is not None

    def instances(self) -> Sequence[Instance]:
        """Return all its workers."""
        return [instance for group in self._groups.values() for instance in group.pool.instances.values()]

    # For frontends.

    @property
    def instance_count(self) -> int:
        """The number of workers that answer for it; prefill workers do not."""
        return sum(len(group.pool.instances) for group in (self._aggregated, self._decode) if group is not None)

    @property
    def missing_roles(self) -> Sequence[str]:
        """Roles without which it cannot be asked now; empty if it can."""
        if self._aggregated is not None:
            return ()
        return [role for role, group in ((DECODE, self._decode), (PREFILL, self._prefill)) if group is None]

    def file(self, name: str) -> bytes | None:
        """Return a file of the model folder; None if the card does not list it."""
        return self._files.get(name)

    def precheck(self, principal: Principal) -> None:
        """Raise `ServiceOverloaded` or `Unavailable` if a request would be refused anyway."""
        whole = self._aggregated
        pools = (
            [whole.pool] if whole is not None and self._decode is None else [group.pool for group in self._own_plan()]
        )
        self._pipeline.precheck(self.name, principal, pools)

    async def admit(self, request: PreprocessedRequest, principal: Principal) -> Permit:
        """Let in a request that is made of several calls; see `ServedModel.admit`."""
        return await self._pipeline.admit(request, principal, self)

    async def generate(
        self, request: PreprocessedRequest, ctx: EngineContext, principal: Principal, permit: Permit | None = None
    ) -> ResponseStream:
        """Admit, route and start a request; return once a worker has accepted it. The caller closes the stream."""
        return await self._pipeline.generate(request, ctx, principal, self, permit)

    async def embed(self, request: EmbedRequest, ctx: EngineContext, principal: Principal) -> EmbedOutput:
        """Embed; see `ServedModel.embed`. There is nothing to hand over, so that one worker does it all."""
        if EMBED_CAPABILITY not in self.card.capabilities:
            raise NotSupported(f"model {self.name!r} does not make embeddings")
        token_ids = [token for tokens in request.token_ids for token in tokens]
        output: EmbedOutput = await self._whole(EMBED, request, token_ids, ctx, principal)
        return output

    async def score(
        self, request: ScoreRequest, token_ids: list[int], ctx: EngineContext, principal: Principal
    ) -> ScoreOutput:
        """Score documents; see `ServedModel.score`. One worker does it all, as for embeddings."""
        capabilities = self.card.capabilities
        if SCORE_CAPABILITY not in capabilities and (RERANK not in capabilities or len(request.queries) != 1):
            raise NotSupported(f"model {self.name!r} does not score texts")
        output: ScoreOutput = await self._whole(SCORE, request, token_ids, ctx, principal)
        return output

    async def _whole(
        self, endpoint: Endpoint, request: Any, token_ids: list[int], ctx: EngineContext, principal: Principal
    ) -> Any:
        """Return the single output of a call that one worker answers."""
        routed_by = PreprocessedRequest(model=self.name, token_ids=token_ids)
        stream = await self._pipeline.call(endpoint, request, routed_by, ctx, principal, _Whole(self))
        try:
            async for output in stream:
                if isinstance(output, endpoint.item_type):
                    return output
            raise StreamIncomplete(f"the worker ended the call of {endpoint.name} without an answer")
        finally:
            await stream.aclose()

    def explain(self, request: PreprocessedRequest, principal: Principal = ANONYMOUS) -> Sequence[RouteView]:
        """Return how its workers look to a request now, by role; nothing is reserved."""
        return [explain_group(group, self._pipeline.tracker, request, principal) for group in self._groups.values()]

    # For requests under way, which may outlive the model's workers and find others.

    def plan(self, excluded: Collection[int] = ()) -> RoutePlan:
        """Return the groups that a request needs, in order; of the model that has this name now.

        See `RoutePlanner.plan`.

        Raises:
            Unavailable: a role is missing.
        """
        return self._now()._own_plan(excluded)

    def one_group(self) -> WorkerGroup:
        """Return the group of a request that one worker answers.

        Raises:
            Unavailable: no worker answers.
        """
        model = self._now()
        group = model._aggregated or model._decode
        if group is None:
            raise model._unavailable()
        return group

    def _now(self) -> Model:
        if self._groups:
            return self
        model = self._successor(self.name)
        # One with another tokenizer would make something else of the same tokens.
        return self if model is None or model.card.checksum != self.card.checksum else model

    def _own_plan(self, excluded: Collection[int] = ()) -> RoutePlan:
        whole, decode, prefill = self._aggregated, self._decode, self._prefill
        if decode is None or prefill is None:
            if whole is None:
                raise self._unavailable()
            return (whole,)
        if whole is None:
            return (prefill, decode)
        if excluded:
            open_whole = _has_other(whole, excluded)
            if open_whole is not (_has_other(prefill, excluded) and _has_other(decode, excluded)):
                return (whole,) if open_whole else (prefill, decode)
        if whole.pool.limited or prefill.pool.limited or decode.pool.limited:
            free_whole = bool(whole.pool.eligible())
            if free_whole is not (bool(prefill.pool.eligible()) and bool(decode.pool.eligible())):
                return (whole,) if free_whole else (prefill, decode)
        return (whole,) if self._load(whole) < self._load(decode) else (prefill, decode)

    def _load(self, group: WorkerGroup) -> float:
        """Return requests per worker in service."""
        requests = self._pipeline.tracker.requests
        workers = group.pool.in_service
        return sum(requests(instance_id) for instance_id in workers) / max(1, len(workers))

    def _unavailable(self) -> Unavailable:
        if not self._groups:
            return Unavailable(f"no worker serves the model {self.name!r} now")
        return Unavailable(f"model {self.name!r} has no {' and no '.join(self.missing_roles)} worker now")


class _Whole:
    """Plans requests that one worker answers, whatever its role."""

    __slots__ = ("_model", "card")

    def __init__(self, model: Model) -> None:
        self._model = model
        self.card = model.card

    def plan(self, excluded: Collection[int] = ()) -> RoutePlan:
        return (self._model.one_group(),)


def _has_other(group: WorkerGroup, excluded: Collection[int]) -> bool:
    return any(instance_id not in excluded for instance_id in group.pool.in_service)


def card_conflict(known: ModelCard, new: ModelCard) -> DynamoError | None:
    """Return why a worker with card `new` cannot serve the model described by `known`; None if it can."""
    if new.kv_cache_block_size != known.kv_cache_block_size:
        return DynamoError(
            f"its KV blocks are of {new.kv_cache_block_size} tokens, those of the workers before it of "
            f"{known.kv_cache_block_size}: set the same block size for all workers of a model"
        )
    if new.kv_hashing != known.kv_hashing and new.kv_hashing is not None and known.kv_hashing is not None:
        return DynamoError(
            f"it hashes its KV blocks by {new.kv_hashing}, the workers before it by {known.kv_hashing}: "
            "run the same release everywhere"
        )
    if new.checksum != known.checksum:
        return DynamoError(
            f"its card has checksum {new.checksum[:12]}, the workers before it {known.checksum[:12]}: "
            "tokenizer, template or engine settings differ"
        )
    return None
