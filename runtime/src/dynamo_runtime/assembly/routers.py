"""The factory of routers, with those that they wrap, and their new settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

from dynamo_core.contracts.config import NESTED, PluginConfig, PluginRef
from dynamo_core.contracts.router import Router, RouterServices
from dynamo_core.errors import PluginError

from dynamo_runtime.assembly.reload import Plan, Step, switch
from dynamo_runtime.assembly.resolve import PickedPlugin


class RouterMaker:
    """Makes one router for each pool, as the section `router` says."""

    def __init__(self, picked: PickedPlugin[Router]) -> None:
        self._outer = picked.section
        self._picked = {one.section: one for one in picked.chain()}
        #: The routers inside each one that was made, with their sections.
        self._inner: WeakKeyDictionary[Router, list[tuple[str, Router]]] = WeakKeyDictionary()

    def make(self, services: RouterServices) -> Router:
        """Return the router of a pool."""
        inside: list[tuple[str, Router]] = []
        router = self._make(self._outer, services, inside)
        self._inner[router] = inside
        return router

    def _make(self, section: str, services: RouterServices, inside: list[tuple[str, Router]]) -> Router:
        picked = self._picked[section]
        below = f"{section}.{NESTED}"

        def inner(ref: PluginRef) -> Router:
            if below not in self._picked or self._picked[below].name != ref.use:
                raise PluginError(f"{section}: {picked.name!r} wraps {ref.use!r}, which its section does not pick")
            router = self._make(below, services, inside)
            inside.append((below, router))
            return router

        return picked.cls(picked.config, replace(services, inner=inner))

    def reload_steps(self, plan: Plan, routers: Callable[[], Iterable[Router]]) -> Iterator[Step]:
        """Yield how the routers of all pools, and those inside, take new settings."""
        for section in self._picked:
            if section in plan.configs:
                yield switch(section, partial(self._reconfigure, section, routers), *plan.configs[section])

    async def _reconfigure(self, section: str, routers: Callable[[], Iterable[Router]], config: PluginConfig) -> None:
        # First those that are yet to be made: one may be while the others take it.
        self._picked[section] = replace(self._picked[section], config=config)
        for outer in routers():
            made = [(self._outer, outer), *self._inner.get(outer, ())]
            for router in [router for place, router in made if place == section]:
                await router.reconfigure(config)
