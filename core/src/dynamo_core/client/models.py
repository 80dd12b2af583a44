"""The models that are served now, kept up to date from discovery."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from dynamo_core.client.caller import Caller
from dynamo_core.client.model import Model, card_conflict
from dynamo_core.client.model_cache import ModelCache
from dynamo_core.client.model_files import fetch_files
from dynamo_core.client.pipeline import Pipeline
from dynamo_core.client.pool import Pool
from dynamo_core.contracts.discovery import Discovery, WatchEvent, WatchKind
from dynamo_core.contracts.router import Router
from dynamo_core.errors import ModelNotFound, Unavailable
from dynamo_core.protocol.records import AGGREGATED, CARDS, INSTANCES, PROTO, Instance, ModelCard
from dynamo_core.tasks import TaskSet
from dynamo_core.text.load import load_tokenizer

log = logging.getLogger(__name__)

#: Makes the router of a pool.
RouterFactory = Callable[[Pool], Router]
#: Announces a hook: its name and its arguments.
Announce = Callable[..., None]

#: Seconds before a failed load or watch is tried again; doubled each time, up to the second, and jittered.
FIRST_RETRY = 0.2
LAST_RETRY = 15.0

_card_decoder = msgspec.json.Decoder(ModelCard)
_instance_decoder = msgspec.json.Decoder(Instance)


@dataclass(slots=True)
class _Worker:
    """What discovery shows of one worker. It can serve when both records are there."""

    card: ModelCard | None = None
    instance: Instance | None = None


class Models:
    """See `dynamo_core.contracts.frontend.ModelDirectory`.

    The records are the truth, the models follow them: after every change a model's pool is made to hold the workers
    whose card agrees with the model's. A model without a worker goes; if workers with another card are there, it is
    loaded anew from them. A load that fails is tried again as long as there are workers.
    """

    def __init__(
        self,
        *,
        discovery: Discovery,
        pipeline: Pipeline,
        caller: Caller,
        make_router: RouterFactory,
        announce: Announce,
        model_cache: ModelCache | None = None,
        expected: Collection[str] = (),
    ) -> None:
        self._discovery = discovery
        self._pipeline = pipeline
        self._caller = caller
        self._make_router = make_router
        self._announce = announce
        self._model_cache = model_cache
        #: Models of the config, and models that were there before: they may be back soon.
        self._expected = set(expected)
        self._models: dict[str, Model] = {}
        self._workers: dict[str, _Worker] = {}
        self._loading: dict[str, asyncio.Task[None]] = {}
        #: Workers that were left out, so that each is told of once.
        self._left_out: set[str] = set()
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
        models, self._models = self._models, {}
        for model in models.values():
            await _close(model.router)

    def get(self, name: str) -> Model:
        """The model with this name; see `ModelDirectory.get`."""
        model = self._models.get(name)
        if model is not None:
            return model
        if not self._models:
            raise Unavailable("no worker has registered yet")
        if name in self._expected:
            raise Unavailable(f"no worker serves the model {name!r} now")
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
        """Returns at the next change of records, models or workers."""
        await self._changed.wait()

    # Watching.

    async def _watch(self) -> None:
        pauses = _pauses()
        while True:
            try:
                async with aclosing(self._discovery.watch("v1/")) as events:
                    known = set(self._workers)
                    async for event in events:
                        self._apply(event, known)
                        if event.kind is WatchKind.SYNCED:
                            pauses = _pauses()
            except Exception:
                log.exception("the watch of discovery broke off")
            self.stale = True
            await asyncio.sleep(next(pauses))

    def _apply(self, event: WatchEvent, gone: set[str]) -> None:
        """Takes in one event. `gone` holds the workers of an earlier watch that this one has not shown yet."""
        match event.kind:
            case WatchKind.SYNCED:
                for path in gone:
                    self._forget(path)
                gone.clear()
                self.stale = False
                self._synced.set()
                self._notify()
            case WatchKind.STALE:
                self.stale = True
            case WatchKind.FRESH:
                self.stale = False
            case WatchKind.PUT:
                try:
                    self._put(event.key, event.value, gone)
                except (msgspec.MsgspecError, ValueError) as error:
                    log.warning("record %r cannot be read and is left out: %s", event.key, error)
            case WatchKind.DELETE:
                self._delete(event.key)

    def _put(self, key: str, value: bytes, gone: set[str]) -> None:
        if key.startswith(CARDS):
            path = key.removeprefix(CARDS)
            card = _card_decoder.decode(value)
            _check_proto(card.proto)
            self._workers.setdefault(path, _Worker()).card = card
        elif key.startswith(INSTANCES):
            path = key.removeprefix(INSTANCES)
            instance = _instance_decoder.decode(value)
            _check_proto(instance.proto)
            self._workers.setdefault(path, _Worker()).instance = instance
        else:
            return
        gone.discard(path)
        self._settle(self._workers[path].card)

    def _delete(self, key: str) -> None:
        for prefix in (CARDS, INSTANCES):
            if key.startswith(prefix):
                self._forget(key.removeprefix(prefix), card=prefix == CARDS)

    def _forget(self, path: str, *, card: bool | None = None) -> None:
        """One record of a worker is gone, or both."""
        worker = self._workers.get(path)
        if worker is None:
            return
        known = worker.card
        if card is not False:
            worker.card = None
        if card is not True:
            worker.instance = None
        if worker.card is None and worker.instance is None:
            del self._workers[path]
            self._left_out.discard(path)
        self._settle(known)

    # Making the models follow the records.

    def _of(self, name: str) -> Iterator[tuple[str, ModelCard, Instance]]:
        """The workers of a model that could serve, with their paths, in order of registration."""
        for path, worker in self._workers.items():
            card, instance = worker.card, worker.instance
            if card is not None and instance is not None and card.name == name and card.worker_type == AGGREGATED:
                yield path, card, instance

    def _settle(self, card: ModelCard | None) -> None:
        """Brings the model that a card belongs to into line with the records."""
        if card is None:
            return
        name = card.name
        model = self._models.get(name)
        if model is not None:
            self._fill(model)
            if not model.pool.instances:
                del self._models[name]
                self._tasks.spawn(_close(model.router), name=f"close-{name}")
                model = None
        if model is None and name not in self._loading and any(self._of(name)):
            self._loading[name] = self._tasks.spawn(self._load(name), name=f"load-{name}")
        self._notify()

    def _fill(self, model: Model) -> None:
        """Makes a pool hold exactly the workers whose cards agree with the model's."""
        pool = model.pool
        present: set[int] = set()
        for path, card, instance in self._of(model.name):
            conflict = card_conflict(model.card, card)
            if conflict is not None:
                if path not in self._left_out:
                    self._left_out.add(path)
                    log.error("worker %x is left out of model %r: %s", instance.instance_id, model.name, conflict)
                continue
            present.add(instance.instance_id)
            known = pool.instances.get(instance.instance_id)
            if known != instance or pool.cards[instance.instance_id] != card:
                pool.add(instance, card)
            if known is None:
                self._announce("dynamo_instance_added", instance=instance, model=model.name)
        for instance_id in set(pool.instances) - present:
            removed = pool.remove(instance_id)
            self._announce("dynamo_instance_removed", instance=removed, model=model.name)

    async def _load(self, name: str) -> None:
        """Makes the model from the first worker that can give its files; goes on as long as there are workers."""
        pauses = _pauses()
        try:
            while True:
                candidates = list(self._of(name))
                if not candidates:
                    return
                for path, card, instance in candidates:
                    model = await self._try(path, card, instance)
                    if model is not None:
                        self._models[name] = model
                        self._expected.add(name)
                        self._fill(model)
                        self._notify()
                        return
                await self._changed_or(next(pauses))
        finally:
            del self._loading[name]

    async def _try(self, path: str, card: ModelCard, instance: Instance) -> Model | None:
        """A model from one worker; None if it cannot be made, or the worker has left meanwhile."""
        router: Router | None = None
        try:
            files = await fetch_files(card, instance, self._caller, self._model_cache)
            # Reading a large tokenizer takes a while; the loop must not stand still for it.
            tokenizer = await asyncio.to_thread(load_tokenizer, card.tokenizer, files)
            pool = Pool(card.name, card.worker_type)
            router = self._make_router(pool)
            await router.start()
        except asyncio.CancelledError:
            if router is not None:
                await _close(router)
            raise
        except Exception as error:
            log.warning("model %r cannot be loaded from worker %x: %s", card.name, card.instance_id, error)
            if router is not None:
                await _close(router)
            return None
        worker = self._workers.get(path)
        if worker is None or worker.card != card or worker.instance is None:
            await _close(router)
            return None
        return Model(card, tokenizer=tokenizer, files=files, pool=pool, router=router, pipeline=self._pipeline)

    async def _changed_or(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _notify(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()


def _check_proto(proto: int) -> None:
    """Records of this version of the protocol or the one before are read; others are refused by name."""
    if proto not in (PROTO, PROTO - 1):
        raise ValueError(f"it speaks protocol {proto}, this process speaks {PROTO}")


def _pauses() -> Iterator[float]:
    """How long to wait before each further try."""
    pause = FIRST_RETRY
    while True:
        yield pause * random.uniform(0.5, 1.5)  # noqa: S311 - spreads retries, guards nothing
        pause = min(pause * 2, LAST_RETRY)


async def _close(router: Router) -> None:
    try:
        await router.aclose()
    except Exception:
        log.exception("router %s could not be closed", router.NAME)
