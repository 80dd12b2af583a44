"""The busy thresholds of all models: configured values, overridden by those set at run time.

Values that were set at run time are kept in discovery, one small value per model and threshold, so that all frontends
have the same ones and two who change different thresholds at once do not undo each other. They outlive their writer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, suppress
from urllib.parse import quote, unquote

import msgspec
from dynamo_core.backoff import jitter
from dynamo_core.contracts.discovery import Discovery, WatchKind
from dynamo_core.contracts.thresholds import THRESHOLDS, Changes, Thresholds, check_changes
from dynamo_core.protocol.cards import check_model_name
from dynamo_core.protocol.decoding import read
from dynamo_core.protocol.unreadable_warnings import UnreadableWarner
from dynamo_core.resources import AsyncResource
from dynamo_core.tasks import TaskSet

log = logging.getLogger(__name__)

#: Seconds before a broken watch is tried again, varied by half.
RETRY = 1.0
#: Seconds that a change may take to come back from the store.
FOLLOW = 1.0

_Values = dict[str, float | int | None]
_decoder = msgspec.json.Decoder(float | int | None)


class ThresholdBook(AsyncResource):
    """See `dynamo_core.contracts.thresholds.ThresholdControl`.

    `common` counts for all models, `models` for some over it. `changed` is called with a model whose thresholds may be
    others now.
    """

    def __init__(
        self,
        directory: Discovery,
        namespace: str,
        *,
        common: Thresholds,
        models: Mapping[str, Changes],
        armed: bool,
        changed: Callable[[str], None],
    ) -> None:
        self._directory = directory
        self._prefix = f"v1/values/{namespace}/busy_threshold/"
        self._common = common
        self._models = models
        self._armed = armed
        self._changed = changed
        #: What was set at run time.
        self._set: dict[str, _Values] = {}
        self._known: dict[str, Thresholds] = {}
        self._unreadable = UnreadableWarner(log, "record")
        self._moved = asyncio.Event()
        self._tasks = TaskSet()

    @property
    def armed(self) -> bool:
        """Whether admission goes by them."""
        return self._armed

    def start(self) -> None:
        """Begin to follow what is set anywhere."""
        if self._armed:
            self._tasks.spawn(self._watch(), name="watch thresholds")

    async def aclose(self) -> None:
        """Stop. Safe twice, and without `start`."""
        await self._tasks.aclose()

    def of(self, model: str) -> Thresholds:
        """Return those of a model."""
        known = self._known.get(model)
        if known is None:
            known = self._common.with_changes(self._models.get(model, {}))
            known = self._known[model] = known.with_changes(self._set.get(model, {}))
        return known

    def configure(self, common: Thresholds, models: Mapping[str, Changes]) -> None:
        """Go by another configuration from now on. What was set at run time still counts over it."""
        self._common, self._models = common, models
        known, self._known = list(self._known), {}
        for model in known:
            self._changed(model)

    def rows(self) -> Iterator[tuple[str, str, float | int | None]]:
        """Yield what was set at run time: model, threshold, value."""
        for model, values in self._set.items():
            yield from ((model, name, value) for name, value in values.items())

    def changed_models(self) -> Iterable[str]:
        """Return models of which something was set at run time."""
        return list(self._set)

    async def change(self, model: str, changes: Changes) -> Thresholds:
        """Set some of a model's thresholds; see `ThresholdControl.change`."""
        check_changes(changes)
        for name, value in changes.items():
            await self._directory.put_value(self._key(model, name), msgspec.json.encode(value))
        await self._announced(lambda: all(_has(self._set.get(model, {}), *item) for item in changes.items()))
        return self.of(model).with_changes(changes)

    async def reset(self, model: str) -> Thresholds:
        """Take back what was set at run time; see `ThresholdControl.reset`."""
        for name in THRESHOLDS:
            await self._directory.put_value(self._key(model, name), None)
        await self._announced(lambda: model not in self._set)
        return self.of(model)

    async def _announced(self, condition: Callable[[], bool]) -> None:
        """Return once the watch has told of a change, or a change of another process came after it.

        Nothing is taken in past the watch: what it tells comes in the order of the store, the same for all frontends.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(FOLLOW):
                while not condition():
                    await self._moved.wait()

    def _key(self, model: str, name: str) -> str:
        return f"{self._prefix}{quote(model, safe='')}/{name}"

    def _note(self, model: str, name: str, value: float | int | None) -> None:
        values = self._set.setdefault(model, {})
        if not _has(values, name, value):
            values[name] = value
            self._renew(model)

    def _forget(self, model: str, name: str) -> None:
        values = self._set.get(model, {})
        if name in values:
            del values[name]
            if not values:
                del self._set[model]
            self._renew(model)

    def _renew(self, model: str) -> None:
        self._known.pop(model, None)
        self._changed(model)
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def _watch(self) -> None:
        while True:
            try:
                async with aclosing(self._directory.watch(self._prefix)) as events:
                    gone = {(model, name) for model, values in self._set.items() for name in values}
                    async for event in events:
                        if event.kind is WatchKind.SYNCED:
                            for model, name in gone:
                                self._forget(model, name)
                        elif event.kind in (WatchKind.PUT, WatchKind.DELETE):
                            self._take(event.key, event.value if event.kind is WatchKind.PUT else None, gone)
            except Exception:
                log.exception("the watch of thresholds broke off")
            await asyncio.sleep(jitter(RETRY))

    def _take(self, key: str, value: bytes | None, gone: set[tuple[str, str]]) -> None:
        """Take in one record; None: it is no more."""
        quoted, _, name = key.removeprefix(self._prefix).partition("/")
        model = unquote(quoted)
        if name not in THRESHOLDS:
            # Of a later version, perhaps.
            return
        gone.discard((model, name))
        if value is None:
            self._forget(model, name)
            return
        try:
            check_model_name(model)
            threshold = read(_decoder, value)
            check_changes({name: threshold})
        except ValueError as error:
            self._unreadable.warn(key, error)
        else:
            self._unreadable.readable(key)
            self._note(model, name, threshold)


def _has(values: _Values, name: str, value: float | int | None) -> bool:
    return name in values and values[name] == value
