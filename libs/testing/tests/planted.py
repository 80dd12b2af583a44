"""Parts with a fault, made from a sound one: for kits that must notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from inspect import isawaitable
from types import FunctionType
from typing import Any, ClassVar


class Proxy:
    """A part before a part, which passes everything on."""

    def __init__(self, inner: Any, owner: Any) -> None:
        self.inner = inner
        self.owner = owner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def mutant(part: type, /, **changes: Any) -> type[Any]:
    """Return a subclass of a part with changes.

    Args:
        part: The sound part.
        **changes: By its name, a function in place of a method, which is called as ``change(real, self, *args)`` with
            the method that it replaces; or the value of another attribute.
    """
    changed = type(part.__name__, (part,), {})
    for name, change in changes.items():
        setattr(changed, name, _method(changed, name, change) if isinstance(change, FunctionType) else change)
    return changed


def _method(owner: type, name: str, change: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **named: Any) -> Any:
        real = getattr(super(owner, self), name, None) or getattr(getattr(self, "inner", None), name, None)
        return change(real, self, *args, **named)

    return method


def made(**changes: Any) -> Callable[..., Any]:
    """Return what puts a `Proxy` with changes before the object that an async method makes; the owner is its maker."""

    async def changed(real: Any, self: Any, *args: Any, **named: Any) -> Any:
        return mutant(Proxy, **changes)(await real(*args, **named), self)

    return changed


def items(change: Callable[[list[Any], Any], Iterable[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """Return what changes a method that yields: each item becomes those of `change(items before it, item)`."""

    async def changed(real: Any, self: Any, *args: Any) -> AsyncGenerator[Any, None]:
        seen: list[Any] = []
        async with aclosing(real(*args)) as stream:
            async for item in stream:
                for one in change(seen, item):
                    yield one
                seen.append(item)

    return changed


def first(action: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls `action(self, *args)` before an async method."""

    async def changed(real: Any, self: Any, *args: Any, **named: Any) -> Any:
        done = action(self, *args, **named)
        if isawaitable(done):
            await done
        return await real(*args, **named)

    return changed


def then(action: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls `action(self, *args)` after an async method."""

    async def changed(real: Any, self: Any, *args: Any, **named: Any) -> Any:
        result = await real(*args, **named)
        done = action(self, *args, **named)
        if isawaitable(done):
            await done
        return result

    return changed


def own(**makers: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return what makes, after an `__init__`, attributes of each object's own with `maker(self)`."""

    def changed(real: Any, self: Any, *args: Any) -> None:
        real(*args)
        for name, make in makers.items():
            setattr(self, name, make(self))

    return changed


def put(part: Any, **values: Any) -> Any:
    """Set attributes, and return the part."""
    part.__dict__.update(values)
    return part


def maps(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return what changes the only argument of a method."""
    return lambda real, self, value: real(change(value))


def twice(when: Callable[[Any], bool] = lambda value: True) -> Callable[..., Any]:
    """Return what calls a method of one argument again where `when(argument)`."""
    return lambda real, self, value: [real(value) for _ in range(2 if when(value) else 1)]


def drops(when: Callable[[Any], bool]) -> Callable[..., Any]:
    """Return what does not call a method of one argument where `when(argument)`."""
    return lambda real, self, value: None if when(value) else real(value)


async def nothing(*done: object) -> None:
    """Do nothing, where a coroutine is expected; the arguments have been done."""


class Planted:
    """Beside a kit in the bases of a class: the kit over a part that can be changed."""

    #: The part under test.
    PART: ClassVar[type[Any]]
    #: The checks that must fail, and no others may.
    FAILS: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def failing(cls, *checks: str, kit: Mapping[str, Any] | None = None, part: Any = None, **changes: Any) -> type[Any]:
        """Return the kit over its part with a fault.

        Args:
            *checks: Those that must fail.
            kit: Changes of the kit.
            part: Another part than `PART`.
            **changes: Those of the part, as `mutant` takes them.
        """
        return mutant(cls, FAILS=frozenset(checks), PART=mutant(part or cls.PART, **changes), **(kit or {}))


def adding(attribute: str) -> Callable[..., Any]:
    """Return what adds one to an attribute with every call of a method."""

    def changed(real: Any, self: Any, *args: Any, **named: Any) -> Any:
        setattr(self, attribute, getattr(self, attribute) + 1)
        return real(*args, **named)

    return changed


def leave_running(part: Any) -> None:
    """Begin a task that outlives the part."""
    part.task = asyncio.ensure_future(asyncio.sleep(60))


async def closes_once(real: Any, self: Any) -> None:
    """Fail in place of the second `aclose`."""
    assert not hasattr(self, "was_closed")
    self.was_closed = True
    await real()


async def notes_its_start(real: Any, self: Any) -> None:
    """Remember that there was a `start`, for `needs_a_start`."""
    self.was_started = True
    await real()


async def needs_a_start(real: Any, self: Any) -> None:
    """Fail in place of an `aclose` without a `start`."""
    assert hasattr(self, "was_started")
    await real()
