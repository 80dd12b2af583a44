"""Hooks: register listeners and call them.

pluggy keeps the specifications and checks the signatures. The calls are made here, one listener at a time: pluggy stops
at the first exception, and a failing listener must not keep the others from being called.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable
from typing import Any

import pluggy

from dynamo_core.hookspecs import hookspec, lifecycle, register

log = logging.getLogger(__name__)

PROJECT = "dynamo"


class HookError(Exception):
    """Raised when a listener does not fit the hooks it claims to implement. The message is one line."""


class Hooks:
    """The listeners of one application."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        for area in (register, lifecycle):
            self._manager.add_hookspecs(area)

    def offer(self, name: str) -> None:
        """Add the hook with which plugins of a kind offer their classes."""

        @hookspec
        def register() -> list[type]:  # type: ignore[empty-body]
            """Return the classes of the plugin."""

        self._manager.add_hookspecs(type(name, (), {name: register}))

    def names(self) -> list[str]:
        """Return every hook there is, sorted."""
        return sorted(name for name, caller in vars(self._manager.hook).items() if caller.has_spec())

    def add(self, listener: object, name: str) -> None:
        """Register a module or an object whose hook implementations carry the marker `hookimpl`.

        Raises:
            HookError: an implementation is misspelled, asks for an unknown parameter, or is a coroutine. The listener
                is then not registered.
        """
        try:
            self._manager.register(listener, name=name)
            self._check(listener)
        except (pluggy.PluginValidationError, HookError) as error:
            if self._manager.is_registered(listener):
                self._manager.unregister(listener)
            raise HookError(" ".join(str(error).split())) from error

    def implemented_by(self, listener: object) -> list[str]:
        """Return the hooks that a registered listener implements, sorted; empty if it is not registered."""
        return sorted(caller.name for caller in self._manager.get_hookcallers(listener) or ())

    def implementation(self, hook_name: str, listener: object) -> Callable[..., Any] | None:
        """Return what one listener implements a hook with; None if it does not."""
        for implementation in self._caller(hook_name).get_hookimpls():
            if implementation.plugin is listener:
                return implementation.function
        return None

    def announce(self, hook_name: str, **kwargs: object) -> None:
        """Call every listener, the last registered first. A failure is logged by name; the others are still called.

        Raises:
            ValueError: there is no such hook, or a parameter of it is missing. Always the caller's mistake.
        """
        caller = self._caller(hook_name)
        assert caller.spec is not None  # noqa: S101 - _caller only gives hooks with a specification
        missing = [name for name in caller.spec.argnames if name not in kwargs]
        if missing:
            raise ValueError(f"{hook_name} needs {', '.join(missing)}")
        for implementation in reversed(caller.get_hookimpls()):
            # A parameter with a default is optional for the listener, yet it wants the value if the hook has one.
            wanted = (*implementation.argnames, *implementation.kwargnames)
            try:
                implementation.function(**{name: kwargs[name] for name in wanted if name in kwargs})
            except Exception:
                log.exception("plugin %s failed in %s", implementation.plugin_name, hook_name)

    def _caller(self, hook_name: str) -> pluggy.HookCaller:
        caller = getattr(self._manager.hook, hook_name, None)
        if caller is None or not caller.has_spec():
            raise ValueError(f"there is no hook {hook_name!r}")
        assert isinstance(caller, pluggy.HookCaller)  # noqa: S101 - tells the type checker
        return caller

    def _check(self, listener: object) -> None:
        for caller in self._manager.get_hookcallers(listener) or ():
            if not caller.has_spec():
                close = difflib.get_close_matches(caller.name, self.names(), n=1, cutoff=0.5)
                hint = f"; did you mean {close[0]}?" if close else f"; the hooks are {', '.join(self.names())}"
                raise HookError(f"there is no hook {caller.name}{hint}")
            for implementation in caller.get_hookimpls():
                if implementation.plugin is not listener:
                    continue
                if implementation.hookwrapper or implementation.wrapper:
                    raise HookError(f"{caller.name} is a wrapper; hooks of this project only listen")
                if inspect.iscoroutinefunction(implementation.function):
                    raise HookError(f"{caller.name} is a coroutine function; hooks are plain functions")
