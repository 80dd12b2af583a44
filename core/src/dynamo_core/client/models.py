"""The models that are served now, kept up to date from discovery."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from dynamo_core.client.caller import Caller
from dynamo_core.client.model import Model, card_conflict
from dynamo_core.client.model_files import fetch_files
from dynamo_core.client.pipeline import Pipeline
from dynamo_core.client.pool import Pool
from dynamo_core.contracts.discovery import Discovery, WatchEvent, WatchKind
from dynamo_core.contracts.router import Router
from dynamo_core.errors import DynamoError, ModelNotFound, Unavailable
from dynamo_core.protocol.records import AGGREGATED, CARDS, INSTANCES, PROTO, Instance, ModelCard
from dynamo_core.tasks import TaskSet
from dynamo_core.text.load import load_tokenizer

log = logging.getLogger(__name__)

#: Makes the router of a pool.
RouterFactory = Callable[[Pool], Router]
#: Announces a hook: its name and its arguments.
Announce = Callable[..., None]

_card_decoder = msgspec.json.Decoder(ModelCard)
_instance_decoder = msgspec.json.Decoder(Instance)


class Models:
    """See `dynamo_core.contracts.frontend.ModelDirectory`.

    A worker is taken in when both its records are there and, if it is the first of its model, the model's files have
    been fetched. A worker whose card contradicts the model's is left out, with a log line.
    """

    def __init__(
        self,
        *,
        discovery: Discovery,
        pipeline: Pipeline,
        caller: Caller,
        make_router: RouterFactory,
        announce: Announce,
    ) -> None:
        self._discovery = discovery
        self._pipeline = pipeline
        self._caller = caller
        self._make_router = make_router
        self._announce = announce
        self._models: dict[str, Model] = {}
        self._cards: dict[str, ModelCard] = {}
        self._instances: dict[str, Instance] = {}
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._tasks = TaskSet()
        self._synced = asyncio.Event()
        self._changed = asyncio.Event()
        #: Whether the view may be out of date because the store cannot be reached.
        self.stale = False

    def start(self) -> None:
        """Begins to watch."""
        self._tasks.spawn(self._watch(), name="watch-models")

    async def aclose(self) -> None:
        """Ends the watch and the routers."""
        await self._tasks.aclose()
        for model in list(self._models.values()):
            await model.aclose()
        self._models.clear()

    def get(self, name: str) -> Model:
        """The model with this name; see `ModelDirectory.get`."""
        model = self._models.get(name)
        if model is not None:
            return model
        if not self._models:
            raise Unavailable("no worker has registered yet")
        raise ModelNotFound(f"the model {name!r} does not exist")

    def list(self) -> Sequence[Model]:
        """All models, by name."""
        return [self._models[name] for name in sorted(self._models)]

    def instances(self) -> Sequence[Instance]:
        """All workers that can be routed to."""
        return [instance for model in self.list() for instance in model.pool.instances.values()]

    @property
    def synced(self) -> bool:
        """Whether discovery's first snapshot is in."""
        return self._synced.is_set()

    async def changed(self) -> None:
        """Returns at the next change of models or workers."""
        event = self._changed
        await event.wait()

    async def _watch(self) -> None:
        async with aclosing(self._discovery.watch("v1/")) as events:
            async for event in events:
                try:
                    await self._apply(event)
                except (msgspec.MsgspecError, ValueError) as error:
                    log.warning("record %r cannot be read and is left out: %s", event.key, error)

    async def _apply(self, event: WatchEvent) -> None:
        match event.kind:
            case WatchKind.SYNCED:
                self._synced.set()
                self._notify()
            case WatchKind.STALE:
                self.stale = True
            case WatchKind.FRESH:
                self.stale = False
            case WatchKind.PUT if event.key.startswith(CARDS):
                self._put(event.key.removeprefix(CARDS), card=_accept(_card_decoder.decode(event.value)))
            case WatchKind.PUT if event.key.startswith(INSTANCES):
                self._put(event.key.removeprefix(INSTANCES), instance=_accept(_instance_decoder.decode(event.value)))
            case WatchKind.DELETE if event.key.startswith(CARDS):
                await self._remove(event.key.removeprefix(CARDS), self._cards)
            case WatchKind.DELETE if event.key.startswith(INSTANCES):
                await self._remove(event.key.removeprefix(INSTANCES), self._instances)
            case _:
                pass

    def _put(self, path: str, *, card: ModelCard | None = None, instance: Instance | None = None) -> None:
        if card is not None:
            self._cards[path] = card
        if instance is not None:
            self._instances[path] = instance
        known_card, known_instance = self._cards.get(path), self._instances.get(path)
        if known_card is None or known_instance is None or known_card.worker_type != AGGREGATED:
            return
        model = self._models.get(known_card.name)
        if model is not None:
            self._join(model, known_instance, known_card)
        elif known_card.name not in self._loading:
            self._loading[known_card.name] = self._tasks.spawn(
                self._load(known_card.name), name=f"load-{known_card.name}"
            )

    async def _load(self, name: str) -> None:
        """Makes the model from the first of its workers that can give its files; then takes in the others."""
        try:
            for path, card in list(self._cards.items()):
                instance = self._instances.get(path)
                if card.name != name or instance is None:
                    continue
                try:
                    model = await self._make(card, instance)
                except DynamoError as error:
                    log.warning("model %r cannot be loaded from worker %x: %s", name, card.instance_id, error)
                    continue
                await model.router.start()
                if any(self._instances.get(p) is not None and c.name == name for p, c in self._cards.items()):
                    self._models[name] = model
                    self._join_all(model)
                else:
                    await model.aclose()
                return
        finally:
            del self._loading[name]

    async def _make(self, card: ModelCard, instance: Instance) -> Model:
        files = await fetch_files(card, instance, self._caller)
        # Reading a large tokenizer takes a while; the loop must not stand still for it.
        tokenizer = await asyncio.to_thread(load_tokenizer, card.tokenizer, files)
        pool = Pool(card.name, card.worker_type)
        return Model(
            card,
            tokenizer=tokenizer,
            files=files,
            pool=pool,
            router=self._make_router(pool),
            pipeline=self._pipeline,
        )

    def _join_all(self, model: Model) -> None:
        for path, card in self._cards.items():
            instance = self._instances.get(path)
            if instance is not None and card.name == model.name and card.worker_type == AGGREGATED:
                self._join(model, instance, card)

    def _join(self, model: Model, instance: Instance, card: ModelCard) -> None:
        conflict = card_conflict(model.card, card)
        if conflict is not None:
            log.error("worker %x is left out of model %r: %s", instance.instance_id, model.name, conflict)
            return
        new = instance.instance_id not in model.pool.instances
        model.pool.add(instance, card)
        if new:
            self._announce("dynamo_instance_added", instance=instance, model=model.name)
        self._notify()

    async def _remove(self, path: str, records: dict[str, Any]) -> None:
        card = self._cards.get(path)
        records.pop(path, None)
        if card is None:
            return
        model = self._models.get(card.name)
        if model is None:
            return
        instance = model.pool.remove(card.instance_id)
        if instance is None:
            return
        self._announce("dynamo_instance_removed", instance=instance, model=model.name)
        if not model.pool.instances:
            del self._models[model.name]
            await model.aclose()
        self._notify()

    def _notify(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()


def _accept(record: Any) -> Any:
    """A record of this version of the protocol or the one before; others are refused by name."""
    if record.proto not in (PROTO, PROTO - 1):
        raise ValueError(f"it speaks protocol {record.proto}, this process speaks {PROTO}")
    return record
