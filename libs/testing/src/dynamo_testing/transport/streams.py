"""Checks of the order of items, the completing flag, and the callbacks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from dynamo_core.contracts.transports.call import Endpoint, ServedContext
from dynamo_core.protocol.annotated import Annotated

from dynamo_testing.transport.harness import INSTANCE, Ask, Stage, Tick, TransportHarness
from dynamo_testing.waiting import turns


class StreamChecks(TransportHarness):
    """A stream that goes well."""

    async def test_items_arrive_in_the_order_they_were_yielded(self, stage: Stage) -> None:
        await stage.serve()

        sink = await stage.collect(Ask(limit=300))

        assert [item.number for item in sink.items] == list(range(300))

    async def test_the_flag_comes_once_and_after_all_items(self, stage: Stage) -> None:
        await stage.serve()

        sink = await stage.collect(Ask(limit=5))

        entries = [entry for entry in sink.log if entry[0] != "closed"]
        assert sink.flags == 1, f"the flag came {sink.flags} times"
        assert entries[-1] == ("event", Annotated.from_complete_final())

    async def test_a_stream_without_items_is_complete(self, stage: Stage) -> None:
        async def nothing(request: Any, ctx: ServedContext) -> AsyncGenerator[Tick, None]:
            return
            yield

        await stage.serve(nothing)

        sink = await stage.collect(Ask())

        assert sink.items == []
        assert sink.outcome() is None

    async def test_closed_is_called_once_and_nothing_follows_it(self, stage: Stage) -> None:
        await stage.serve()

        sink = await stage.collect(Ask(limit=3))
        await stage.collect(Ask(limit=3))
        await turns()

        assert len(sink.ends) == 1, f"closed was called {len(sink.ends)} times"
        assert sink.log[-1][0] == "closed"

    async def test_a_complete_stream_is_closed_without_an_error(self, stage: Stage) -> None:
        await stage.serve()

        sink = await stage.collect(Ask(limit=3))

        assert sink.ends[0] is None

    async def test_annotations_keep_their_place_among_the_items(self, stage: Stage) -> None:
        note = Annotated[Tick].from_annotation("llm_metrics", {"tokens": 3, "text": "größer"})

        async def annotated(request: Any, ctx: ServedContext) -> AsyncGenerator[Any, None]:
            yield Tick(0)
            yield note
            yield Tick(1)

        await stage.serve(annotated)

        sink = await stage.collect(Ask())

        seen = [what for kind, what in sink.log if kind == "data" or (kind == "event" and what.event == note.event)]
        assert seen == [Tick(0), note, Tick(1)]

    async def test_ids_and_metadata_reach_the_handler(self, stage: Stage) -> None:
        await stage.serve()
        metadata = {"traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01", "x-request-id": "größe"}

        call = await stage.call(Ask(limit=1), ctx=stage.context(attempt_id="attempt-7", metadata=metadata))
        await call.sink.end()

        seen = stage.visits[0].ctx
        assert seen.id == call.ctx.id
        assert seen.attempt_id == "attempt-7"
        assert {key: seen.metadata.get(key) for key in metadata} == metadata

    async def test_a_call_returns_when_it_is_accepted_even_if_no_item_comes(self, stage: Stage) -> None:
        async def silent(request: Any, ctx: ServedContext) -> AsyncGenerator[Tick, None]:
            await ctx.stopped()
            yield Tick(0)

        await stage.serve(silent)

        call = await stage.call(Ask())

        assert call.sink.items == []
        await stage.close(call.source)

    async def test_a_call_does_not_return_before_it_is_accepted(self, stage: Stage) -> None:
        opened = asyncio.Event()

        async def door(request: Any, ctx: ServedContext) -> None:
            await opened.wait()

        await stage.serve(door=door)
        async with asyncio.TaskGroup() as group:
            calling = group.create_task(stage.call(Ask(limit=1)))
            await stage.visit()
            await turns()
            early = calling.done()
            opened.set()

        assert not early, "the call returned although the handler had not accepted it"
        await calling.result().sink.end()

    async def test_every_endpoint_and_every_instance_gets_its_own_calls(self, stage: Stage) -> None:
        def named(name: str) -> Any:
            async def body(request: str, ctx: ServedContext) -> AsyncGenerator[str, None]:
                yield f"{name} {request}"

            return body

        first, second = Endpoint("first", str, str), Endpoint("second", str, str)
        for instance_id in (INSTANCE, INSTANCE + 1):
            for endpoint in (first, second):
                await stage.serve(named(f"{instance_id} {endpoint.name}"), endpoint=endpoint, instance_id=instance_id)

        answers = {
            (instance_id, endpoint.name): (
                await stage.collect("hello", endpoint=endpoint, instance=stage.instance(instance_id))
            ).items
            for instance_id in (INSTANCE, INSTANCE + 1)
            for endpoint in (first, second)
        }

        assert answers == {key: [f"{key[0]} {key[1]} hello"] for key in answers}

    async def test_the_source_of_a_finished_stream_can_be_used_without_effect(self, stage: Stage) -> None:
        await stage.serve()
        call = await stage.call(Ask(limit=2))
        await call.sink.end()
        before = list(call.sink.log)

        call.source.pause()
        call.source.resume()
        call.source.stop()
        await stage.close(call.source)
        await stage.close(call.source)
        await turns()

        assert call.sink.log == before
        assert stage.visits[0].stops == 0, "a stream that had ended was stopped"

    async def test_deferred_callbacks_run_once_after_the_call(self, stage: Stage) -> None:
        await stage.serve()

        await stage.collect(Ask(limit=2))
        visit = await stage.visit()
        await stage.happens(visit.over, "what was deferred")
        await turns()

        assert visit.deferred == 1
        assert visit.left.is_set()
