from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from dynamo_core.contracts.requests.context import EngineContext, GenerateContext
from dynamo_core.contracts.transports.call import ServedContext


def test_the_attempt_id_defaults_to_the_request_id() -> None:
    assert EngineContext("r").attempt_id == "r"
    assert EngineContext("r", attempt_id="r-2").attempt_id == "r-2"


def test_metadata_is_a_copy() -> None:
    given = {"traceparent": "x"}

    context = EngineContext("r", metadata=given)
    given.clear()

    assert context.metadata == {"traceparent": "x"}


def test_stop_does_not_kill_but_kill_stops() -> None:
    stopped, killed = EngineContext("a"), EngineContext("b")

    stopped.stop_generating()
    killed.kill()

    assert (stopped.is_stopped(), stopped.is_killed()) == (True, False)
    assert (killed.is_stopped(), killed.is_killed()) == (True, True)


def test_a_stopped_context_can_still_be_killed() -> None:
    context = EngineContext("r")

    context.stop_generating()
    context.kill()

    assert context.is_killed()


@pytest.mark.parametrize("end", [EngineContext.stop_generating, EngineContext.kill])
async def test_stop_waiters_wake_on_stop_and_kill(end: Callable[[EngineContext], None]) -> None:
    context = EngineContext("r")
    waiters = [asyncio.ensure_future(context.stopped()) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(waiter.done() for waiter in waiters)

    end(context)

    await asyncio.wait_for(asyncio.gather(*waiters), 5)
    await asyncio.wait_for(context.stopped(), 5)


async def test_kill_waiters_ignore_a_stop() -> None:
    context = EngineContext("r")
    waiter = asyncio.ensure_future(context.killed())
    await asyncio.sleep(0)

    context.stop_generating()
    await asyncio.sleep(0)
    assert not waiter.done()
    context.kill()

    await asyncio.wait_for(waiter, 5)
    await asyncio.wait_for(context.killed(), 5)


def test_stop_callbacks_run_once_in_order() -> None:
    context = EngineContext("r")
    calls: list[str] = []
    context.on_stop(lambda: calls.append("a"))
    context.on_stop(lambda: calls.append("b"))

    context.stop_generating()
    context.stop_generating()
    context.kill()

    assert calls == ["a", "b"]


def test_a_callback_registered_after_the_stop_runs_at_once() -> None:
    context = EngineContext("r")
    context.stop_generating()
    calls: list[str] = []

    forget = context.on_stop(lambda: calls.append("late"))

    assert calls == ["late"]
    forget()


def test_a_removed_callback_does_not_run() -> None:
    context = EngineContext("r")
    calls: list[str] = []
    forget = context.on_stop(lambda: calls.append("no"))
    context.on_stop(lambda: calls.append("yes"))

    forget()
    forget()
    context.stop_generating()
    forget()

    assert calls == ["yes"]


def test_a_callback_may_remove_others_during_the_stop() -> None:
    context = EngineContext("r")
    calls: list[str] = []
    forgets: dict[str, Callable[[], None]] = {}

    def first() -> None:
        calls.append("first")
        forgets["first"]()
        forgets["third"]()

    forgets["first"] = context.on_stop(first)
    forgets["second"] = context.on_stop(lambda: calls.append("second"))
    forgets["third"] = context.on_stop(lambda: calls.append("third"))

    context.stop_generating()

    assert calls == ["first", "second"]


def test_a_callback_registered_while_the_context_stops_runs_at_once() -> None:
    context = EngineContext("r")
    calls: list[str] = []

    def outer() -> None:
        context.on_stop(lambda: calls.append("inner"))
        calls.append("outer")

    context.on_stop(outer)

    context.stop_generating()

    assert calls == ["inner", "outer"]


def test_a_stop_reaches_children_but_not_parents() -> None:
    parent, child, grandchild = EngineContext("p"), EngineContext("c"), EngineContext("g")
    parent.link_child(child)
    child.link_child(grandchild)

    child.stop_generating()
    assert (parent.is_stopped(), grandchild.is_stopped()) == (False, True)

    parent.kill()
    assert (child.is_killed(), grandchild.is_killed()) == (True, True)


@pytest.mark.parametrize("killed", [True, False])
def test_a_child_linked_after_the_stop_ends_at_once(killed: bool) -> None:
    parent, child = EngineContext("p"), EngineContext("c")
    if killed:
        parent.kill()
    else:
        parent.stop_generating()

    parent.link_child(child)

    assert (child.is_stopped(), child.is_killed()) == (True, killed)


async def test_the_generate_context_delegates_to_the_plain_one() -> None:
    inner = EngineContext("r", attempt_id="r-1", metadata={"k": "v"})
    context = GenerateContext(inner)
    calls: list[str] = []
    context.on_stop(lambda: calls.append("stopped"))

    assert (context.id, context.attempt_id, context.metadata) == ("r", "r-1", {"k": "v"})
    assert context.inner() is inner
    context.stop_generating()
    await asyncio.wait_for(context.stopped(), 5)
    assert context.is_stopped()
    assert not context.is_killed()
    context.kill()
    await asyncio.wait_for(context.killed(), 5)

    assert inner.is_killed()
    assert calls == ["stopped"]


def test_the_first_token_callback_runs_once() -> None:
    calls: list[str] = []
    context = GenerateContext(EngineContext("r"), first_token=lambda: calls.append("first"))

    context.notify_first_token()
    context.notify_first_token()

    assert calls == ["first"]


def test_first_token_without_a_callback_is_ignored() -> None:
    GenerateContext(EngineContext("r")).notify_first_token()


def test_deferred_callbacks_run_once_in_reverse_order() -> None:
    context = ServedContext("r")
    calls: list[int] = []
    for number in range(3):
        context.defer(lambda number=number: calls.append(number))  # type: ignore[misc]

    context.close()
    context.close()

    assert calls == [2, 1, 0]


def test_a_callback_deferred_after_the_close_runs_at_once() -> None:
    context = ServedContext("r")
    context.close()
    calls: list[str] = []

    context.defer(lambda: calls.append("late"))

    assert calls == ["late"]


def test_a_failing_deferred_callback_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    context = ServedContext("r")
    calls: list[str] = []

    def fail() -> None:
        raise ZeroDivisionError

    context.defer(lambda: calls.append("released"))
    context.defer(fail)

    context.close()

    assert calls == ["released"]
    assert "call r failed" in caplog.text
