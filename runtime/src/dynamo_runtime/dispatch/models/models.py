"""The served models, kept up to date from discovery."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from dynamo_core.backoff import pauses
from dynamo_core.contracts.discovery import Discovery, WatchEvent, WatchKind
from dynamo_core.contracts.parsers import NO_PARSERS, Parsers
from dynamo_core.contracts.router import Router
from dynamo_core.contracts.tokenizer import Tokenizer
from dynamo_core.errors import ModelNotFound, NotSupported, Unavailable
from dynamo_core.protocol.cards import read_card, read_instance
from dynamo_core.protocol.decoding import Unreadable, truncated
from dynamo_core.protocol.records import AGGREGATED, CARDS, DECODE, INSTANCES, PREFILL, Instance, ModelCard
from dynamo_core.protocol.unreadable_warnings import UnreadableWarner
from dynamo_core.resources import AsyncResource
from dynamo_core.tasks import TaskSet

from dynamo_runtime.dispatch.execution.endpoint_caller import Caller
from dynamo_runtime.dispatch.execution.pipeline import Pipeline
from dynamo_runtime.dispatch.models.cache import ModelCache
from dynamo_runtime.dispatch.models.files import fetch_files
from dynamo_runtime.dispatch.models.model import Model, card_conflict
from dynamo_runtime.dispatch.pools.pool import Pool
from dynamo_runtime.dispatch.pools.worker_group import WorkerGroup

log = logging.getLogger(__name__)

#: Seconds of one turn of the loop in which changes of discovery are taken in.
SLICE = 0.005
#: Makes the router of a pool.
RouterFactory = Callable[[Pool], Router]
#: Makes the tokenizer of a model from its kind and the model's files.
TokenizerLoader = Callable[[str, Mapping[str, bytes]], Tokenizer]
#: The parsers that a card names, for a model with these files.
ParserLoader = Callable[[ModelCard, Mapping[str, bytes]], Awaitable[Parsers]]
#: Announces a hook: its name and its arguments.
Announce = Callable[..., None]

#: Seconds before a failed load or watch is tried again; doubled each time, up to the second, and jittered.
FIRST_RETRY = 0.2
LAST_RETRY = 15.0

#: The roles that are known here. Those that answer clients make a model appear.
ANSWERING = (AGGREGATED, DECODE)
ROLES = (*ANSWERING, PREFILL)


def _no_tokenizers(kind: str, files: Mapping[str, bytes]) -> Tokenizer:
    raise NotSupported("no API makes tokenizers")


async def _no_parsers(card: ModelCard, files: Mapping[str, bytes]) -> Parsers:
    return NO_PARSERS


@dataclass(frozen=True, slots=True)
class _Place:
    """The pool of a routable worker."""

    model: Model
    role: str
    instance_id: int


@dataclass(slots=True)
class _Worker:
    """One worker's records in discovery. It can serve when both are there; then it has a place."""

    card: ModelCard | None = None
    instance: Instance | None = None
    place: _Place | None = None


class _Slices:
    """Work on the event loop in slices of `SLICE` seconds: a whole fleet may come or leave at once."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    async def give_way(self) -> None:
        """Let the rest of the loop run, if the slice is over."""
        if time.monotonic() - self._begun > SLICE:
            await asyncio.sleep(0)
            self._begun = time.monotonic()


class Models(AsyncResource):
    """See `dynamo_core.contracts.frontend.ModelDirectory`.

    The records are the truth, the models follow them: after every change of a worker's records it is in the pool of its
    role if its card agrees with the model's, and nowhere else; the other workers are not looked at. A role without
    workers goes, and so does a model without workers that answer clients; if workers with another card are there, it is
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
        load_tokenizer: TokenizerLoader = _no_tokenizers,
        model_cache: ModelCache | None = None,
        expected: Collection[str] = (),
        load_parsers: ParserLoader = _no_parsers,
    ) -> None:
        self._discovery = discovery
        self._pipeline = pipeline
        self._caller = caller
        self._make_router = make_router
        self._announce = announce
        self._model_cache = model_cache
        self._load_tokenizer = load_tokenizer
        self._load_parsers = load_parsers
        #: Models of the config, and models that were there before: they may be back soon.
        self._expected = set(expected)
        self._models: dict[str, Model] = {}
        self._workers: dict[str, _Worker] = {}
        #: Whether any worker ever has registered.
        self._registered = False
        self._loading: dict[str, asyncio.Task[None]] = {}
        #: Roles of models whose routers are being made.
        self._opening: set[tuple[Model, str]] = set()
        #: Routers that are made and not yet in a model.
        self._starting: set[Router] = set()
        #: Workers that were left out, so that each is told of once.
        self._left_out: set[str] = set()
        self._unreadable = UnreadableWarner(log, "record")
        self._tasks = TaskSet()
        self._synced = asyncio.Event()
        self._changed = asyncio.Event()
        #: Whether the view may be out of date because the store cannot be reached.
        self.stale = False

    def use_tokenizers(self, load_tokenizer: TokenizerLoader) -> None:
        """Have an API make the tokenizers, which is itself made with these models. To be called before `start`."""
        self._load_tokenizer = load_tokenizer

    def start(self) -> None:
        """Begin to watch."""
        self._tasks.spawn(self._watch(), name="watch-models")

    async def aclose(self) -> None:
        """End the watch and the routers."""
        await self._tasks.aclose()
        models, self._models = self._models, {}
        for model in models.values():
            for group in model.groups.values():
                await _close(group.router)

    def get(self, name: str) -> Model:
        """Return the model with this name; see `ModelDirectory.get`."""
        model = self._models.get(name)
        if model is not None:
            return model
        if any(self._of(name, (PREFILL,))):
            raise Unavailable(f"model {name!r} has no decode worker now")
        if not (self._models or self._registered):
            raise Unavailable("no worker has registered yet")
        if name in self._loading:
            raise Unavailable(f"the model {name!r} is being loaded")
        if name in self._expected:
            raise Unavailable(f"no worker serves the model {name!r} now")
        if not self._models:
            raise Unavailable("no worker is registered now")
        raise ModelNotFound(f"the model '{truncated(name)}' does not exist")

    def list(self) -> Sequence[Model]:
        """Return all models, by name."""
        # In one go, as /metrics asks from another thread.
        return [model for _, model in sorted(self._models.items())]

    def routers(self) -> Sequence[Router]:
        """Return the routers of all models, and those that are starting."""
        return [*(group.router for model in self.list() for group in model.groups.values()), *self._starting]

    def missing_roles(self, name: str) -> Sequence[str]:
        """Return roles without which this model cannot be asked now; see `ModelDirectory.missing_roles`."""
        if (model := self._models.get(name)) is not None:
            return model.missing_roles
        return (DECODE,) if any(self._of(name, (PREFILL,))) else ()

    def readiness(self) -> Mapping[str, bool]:
        """See `ModelDirectory.readiness`."""
        # In steps that nothing interrupts, as /metrics asks from another thread.
        names = self._expected.union(card.name for worker in list(self._workers.values()) if (card := worker.card))
        return {
            name: (model := self._models.get(name)) is not None and not model.missing_roles for name in sorted(names)
        }

    def instances(self) -> Sequence[Instance]:
        """Return all workers that can be routed to, and the prefill workers that wait for a worker that answers."""
        instances = [instance for model in self.list() for instance in model.instances()]
        for worker in self._workers.values():
            card, instance = worker.card, worker.instance
            if card is None or instance is None or card.worker_type != PREFILL or card.name in self._models:
                continue
            instances.append(instance)
        return instances

    def workers(self) -> Sequence[tuple[ModelCard, Instance]]:
        """Return all workers whose two records are there, also those that get no requests."""
        pairs = [(worker.card, worker.instance) for worker in self._workers.values()]
        return [(card, instance) for card, instance in pairs if card is not None and instance is not None]

    def pools(self) -> Sequence[Pool]:
        """Return the workers that can be routed to, by model and role."""
        return [group.pool for model in self.list() for group in tuple(model.groups.values())]

    @property
    def synced(self) -> bool:
        """Whether discovery's first snapshot is in."""
        return self._synced.is_set()

    async def changed(self) -> None:
        """Return at the next change of records, models or workers."""
        await self._changed.wait()

    # Watching.

    async def _watch(self) -> None:
        waits = pauses(FIRST_RETRY, LAST_RETRY)
        while True:
            try:
                async with aclosing(self._discovery.watch("v1/")) as events:
                    known = set(self._workers)
                    work = _Slices()
                    async for event in events:
                        await work.give_way()
                        if event.kind is WatchKind.SYNCED:
                            for path in known:
                                self._forget(path)
                                await work.give_way()
                            known.clear()
                        self._apply(event, known)
                        if event.kind is WatchKind.SYNCED:
                            waits = pauses(FIRST_RETRY, LAST_RETRY)
            except Exception:
                log.exception("the watch of discovery broke off")
            self.stale = True
            await asyncio.sleep(next(waits))

    def _apply(self, event: WatchEvent, gone: set[str]) -> None:
        """Take in one event. `gone` holds the workers of an earlier watch that this one has not shown yet."""
        match event.kind:
            case WatchKind.SYNCED:
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
                except Unreadable as error:
                    self._unreadable.warn(event.key, error)
            case WatchKind.DELETE:
                self._unreadable.readable(event.key)
                self._delete(event.key)

    def _put(self, key: str, value: bytes, gone: set[str]) -> None:
        if key.startswith(CARDS):
            path = key.removeprefix(CARDS)
            card = read_card(value)
            self._workers.setdefault(path, _Worker()).card = card
        elif key.startswith(INSTANCES):
            path = key.removeprefix(INSTANCES)
            instance = read_instance(value)
            self._workers.setdefault(path, _Worker()).instance = instance
            self._registered = True
        else:
            return
        self._unreadable.readable(key)
        gone.discard(path)
        self._settle(path, self._workers[path])

    def _delete(self, key: str) -> None:
        for prefix in (CARDS, INSTANCES):
            if key.startswith(prefix):
                self._forget(key.removeprefix(prefix), card=prefix == CARDS)

    def _forget(self, path: str, *, card: bool | None = None) -> None:
        """Forget a worker of which a record, or both, are gone."""
        worker = self._workers.get(path)
        if worker is None:
            return
        known = worker.card.name if worker.card is not None else None
        if card is not False:
            worker.card = None
        if card is not True:
            worker.instance = None
        if worker.card is None and worker.instance is None:
            del self._workers[path]
            self._left_out.discard(path)
        self._settle(path, worker, known)

    # Making the models follow the records.

    def _of(self, name: str, roles: Collection[str]) -> Iterator[tuple[str, ModelCard, Instance]]:
        """Yield the workers of a model that could serve in these roles, with their paths, in order of registration."""
        for path, worker in self._workers.items():
            card, instance = worker.card, worker.instance
            if card is not None and instance is not None and card.name == name and card.worker_type in roles:
                yield path, card, instance

    def _settle(self, path: str, worker: _Worker, *before: str | None) -> None:
        """Bring the models in line with the records of one worker. `before` are models that it served until now."""
        names = {*before, worker.place.model.name if worker.place is not None else None}
        names.add(worker.card.name if worker.card is not None else None)
        self._put_in_place(path, worker)
        for name in names - {None}:
            self._settle_model(str(name))
        self._notify()

    def _settle_model(self, name: str) -> None:
        """End what has no workers left, and begin what has some."""
        model = self._models.get(name)
        if model is not None:
            for role, group in tuple(model.groups.items()):
                if not group.pool.instances:
                    self._drop(model, role)
            if not model.answers:
                log.warning("model %s has lost its last worker: requests for it are refused until one is there", name)
                del self._models[name]
                for role in tuple(model.groups):
                    self._drop(model, role)
                model = None
        if model is None and name not in self._loading and any(self._of(name, ANSWERING)):
            self._loading[name] = self._tasks.spawn(self._load(name), name=f"load-{name}")

    def _fit(self, model: Model) -> None:
        """Put all workers of a model in their places, after it or a role of it has come."""
        for path, worker in self._workers.items():
            if worker.card is not None and worker.card.name == model.name:
                self._put_in_place(path, worker)

    def _put_in_place(self, path: str, worker: _Worker) -> None:
        """Make one worker's place what its records say, and its pool hold the records as they are now."""
        card, instance = worker.card, worker.instance
        place: _Place | None = None
        if card is not None and instance is not None:
            model = self._models.get(card.name)
            if model is not None and card.worker_type in ROLES and self._agrees(path, model, card):
                place = _Place(model, card.worker_type, instance.instance_id)
        if worker.place is not None and worker.place != place:
            self._take_out(worker)
        if place is None or card is None or instance is None:
            return
        group = place.model.groups.get(place.role)
        if group is None:
            self._schedule_open(place.model, place.role)
            return
        pool = group.pool
        known = pool.instances.get(place.instance_id)
        if known != instance or pool.cards[place.instance_id] != card:
            pool.add(instance, card)
        worker.place = place
        if known is None:
            self._announce("dynamo_instance_added", instance=instance, model=place.model.name)

    def _take_out(self, worker: _Worker) -> None:
        """Take a worker from its place."""
        place, worker.place = worker.place, None
        group = place.model.groups.get(place.role) if place is not None else None
        if place is not None and group is not None:
            removed = group.pool.remove(place.instance_id)
            if removed is not None:
                self._announce("dynamo_instance_removed", instance=removed, model=place.model.name)

    def _agrees(self, path: str, model: Model, card: ModelCard) -> bool:
        conflict = card_conflict(model.card, card)
        if conflict is not None and path not in self._left_out:
            self._left_out.add(path)
            log.error("worker %016x is left out of model %r: %s", card.instance_id, model.name, conflict)
        return conflict is None

    def _drop(self, model: Model, role: str) -> None:
        """Take a role from a model, with whatever workers it has."""
        for worker in self._workers.values():
            if worker.place is not None and worker.place.model is model and worker.place.role == role:
                self._take_out(worker)
        group = model.remove(role)
        self._tasks.spawn(_close(group.router), name=f"close-{model.name}-{role}")

    def _schedule_open(self, model: Model, role: str) -> None:
        if (model, role) not in self._opening:
            self._opening.add((model, role))
            self._tasks.spawn(self._open(model, role), name=f"open-{model.name}-{role}")

    async def _open(self, model: Model, role: str) -> None:
        """Add a role to a model; go on as long as it has workers of that role."""
        waits = pauses(FIRST_RETRY, LAST_RETRY)
        try:
            while self._models.get(model.name) is model and self._is_wanted(model, role):
                group = await self._make_group(model.name, role)
                if group is not None:
                    if self._models.get(model.name) is not model:
                        await _close(group.router)
                        return
                    model.add(group)
                    self._fit(model)
                    self._notify()
                    return
                await self._changed_or(next(waits))
        finally:
            self._opening.discard((model, role))

    def _is_wanted(self, model: Model, role: str) -> bool:
        """Return whether there are workers for a role."""
        return any(card_conflict(model.card, card) is None for _, card, _ in self._of(model.name, (role,)))

    async def _make_group(self, name: str, role: str) -> WorkerGroup | None:
        """Return a pool without workers and its running router; None if the router cannot be started."""
        pool = Pool(name, role)
        router: Router | None = None
        try:
            router = self._make_router(pool)
            self._starting.add(router)
            await router.start()
        except BaseException as error:
            if router is not None:
                self._starting.discard(router)
                await _close(router)
            if not isinstance(error, Exception):
                raise
            log.warning("the router of model %r for %s workers cannot be started: %s", name, role, error)
            return None
        self._starting.discard(router)
        return WorkerGroup(pool, router)

    async def _load(self, name: str) -> None:
        """Make the model from the first worker that can give its files; go on as long as there are workers."""
        waits = pauses(FIRST_RETRY, LAST_RETRY)
        try:
            while True:
                candidates = list(self._of(name, ANSWERING))
                if not candidates:
                    return
                for path, card, instance in candidates:
                    model = await self._try(path, card, instance)
                    if model is not None:
                        self._models[name] = model
                        self._expected.add(name)
                        self._fit(model)
                        self._notify()
                        return
                await self._changed_or(next(waits))
        finally:
            del self._loading[name]

    async def _try(self, path: str, card: ModelCard, instance: Instance) -> Model | None:
        """Return a model from one worker; None if it cannot be made, or the worker has left meanwhile."""
        try:
            files = await fetch_files(card, instance, self._caller, self._model_cache)
            # Reading a large tokenizer takes a while; the loop must not stand still for it.
            tokenizer = await asyncio.to_thread(self._load_tokenizer, card.tokenizer, files)
            parsers = await self._load_parsers(card, files)
        except Exception as error:
            log.warning("model %r cannot be loaded from worker %016x: %s", card.name, card.instance_id, error)
            return None
        group = await self._make_group(card.name, card.worker_type)
        if group is None:
            return None
        worker = self._workers.get(path)
        if worker is None or worker.card != card or worker.instance is None:
            await _close(group.router)
            return None
        model = Model(
            card,
            tokenizer=tokenizer,
            files=files,
            pipeline=self._pipeline,
            parsers=parsers,
            successor=lambda name: self._models.get(name),
        )
        model.add(group)
        return model

    async def _changed_or(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _notify(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()


async def _close(router: Router) -> None:
    try:
        await router.aclose()
    except Exception:
        log.exception("router %s could not be closed", router.NAME)
