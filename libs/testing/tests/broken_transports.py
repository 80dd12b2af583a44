"""Transports that break one promise each, and what of the kit must find it.

Not collected with the other tests: `test_the_kits_find_broken_parts` runs this file and compares.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from contextvars import Context, copy_context
from typing import Any, ClassVar

import msgspec
import pytest
from dynamo_core import (
    DynamoError,
    EmbedOutput,
    Endpoint,
    EngineContext,
    Handler,
    LLMEngineOutput,
    PluginConfig,
    PreprocessedRequest,
    Served,
    ServedContext,
    Sink,
    Source,
    TaskSet,
)
from dynamo_core.errors import Disconnected, InvalidArgument, StreamIncomplete, Unknown
from dynamo_core.protocol import Annotated, Instance
from dynamo_plugin_transport_inproc.transport import InprocTransport
from dynamo_telemetry import Metrics
from dynamo_testing.transport.contexts import ContextChecks
from dynamo_testing.transport.endings import EndChecks
from dynamo_testing.transport.errors import ErrorChecks
from dynamo_testing.transport.flow import FlowChecks
from dynamo_testing.transport.harness import COUNT, Ask, Planes, Tick
from dynamo_testing.transport.payloads import Parcel, PayloadChecks
from dynamo_testing.transport.stopping import StopChecks
from dynamo_testing.transport.streams import StreamChecks


class Wire:
    """A sink before the sink; what it is told goes through unchanged."""

    def __init__(self, sink: Sink, transport: Meddler) -> None:
        self.sink = sink
        self.transport = transport

    def data(self, item: Any) -> None:
        self.sink.data(item)

    def event(self, item: Annotated[Any]) -> None:
        self.sink.event(item)

    def closed(self, error: DynamoError | None) -> None:
        self.sink.closed(error)


class Grip(Source):
    """A source before the source."""

    def __init__(self, source: Source, wire: Wire) -> None:
        self.source = source
        self.wire = wire

    async def aclose(self) -> None:
        await self.source.aclose()

    def stop(self) -> None:
        self.source.stop()

    def pause(self) -> None:
        self.source.pause()

    def resume(self) -> None:
        self.source.resume()


class Office(Served):
    """What is served before what is served."""

    def __init__(self, served: Served) -> None:
        self.served = served

    @property
    def address(self) -> dict[str, str]:
        return self.served.address

    async def drain(self, timeout: float) -> bool:
        return await self.served.drain(timeout)

    async def aclose(self) -> None:
        await self.served.aclose()


class Meddler(InprocTransport):
    """A transport without a fault, whose parts can be exchanged for faulty ones."""

    wire: type[Wire] = Wire
    grip: type[Grip] = Grip
    office: type[Office] = Office

    def __init__(self) -> None:
        super().__init__(PluginConfig(), Metrics())
        self.sources: list[Source] = []
        self.losing = False

    def context(self, ctx: EngineContext) -> EngineContext:
        return ctx

    def handler(self, handler: Handler) -> Handler:
        return handler

    def instance(self, instance: Instance) -> Instance:
        return instance

    def endpoint(self, endpoint: Endpoint) -> Endpoint:
        return endpoint

    def request(self, request: Any) -> Any:
        return request

    def refused(self, error: BaseException, sink: Sink) -> None:
        """A call was refused or cancelled; the error is raised next."""

    async def serve(self, instance_id: int, endpoint: Endpoint, handler: Handler) -> Served:
        return self.office(await super().serve(instance_id, endpoint, self.handler(handler)))

    async def call(
        self, instance: Instance, endpoint: Endpoint, request: Any, ctx: EngineContext, sink: Sink
    ) -> Source:
        wire = self.wire(sink, self)
        there, name = self.instance(instance), self.endpoint(endpoint)
        try:
            source = await super().call(there, name, self.request(request), self.context(ctx), wire)
        except (DynamoError, asyncio.CancelledError) as error:
            self.refused(error, sink)
            raise
        self.sources.append(source)
        return self.grip(source, wire)


class Broken(StreamChecks, ErrorChecks, StopChecks, FlowChecks, EndChecks, ContextChecks):
    """The kit over one transport; without the slow checks of what payloads look like."""

    #: The transport under test.
    transport: ClassVar[type[Meddler]] = Meddler
    #: The checks that must fail, and no others may.
    FAILS: ClassVar[frozenset[str]] = frozenset()
    #: The seconds that a check waits which must fail, and any other.
    PATIENCE = (0.2, 10.0)

    @pytest.fixture
    async def planes(self) -> AsyncIterator[Planes]:
        transport = self.transport()
        yield Planes(server=transport, client=transport)
        await transport.aclose()


class BrokenPayloads(Broken, PayloadChecks):
    """The whole kit."""


class TestWithoutAFault(BrokenPayloads):
    pass


class TestHandsOverWhatCannotBeEncoded(BrokenPayloads):
    class transport(Meddler):  # noqa: N801 - the part that is exchanged, as the attribute is named
        CROSS_PROCESS = True

    FAILS = frozenset(
        {
            "test_an_item_that_cannot_be_encoded_ends_its_own_stream_only_with_an_error",
            "test_an_item_of_another_type_than_the_caller_expects_makes_the_stream_incomplete",
            "test_a_request_of_the_wrong_type_is_refused",
        }
    )


class TestTellsInTheContextOfTheFirstCall(Broken):
    class transport(Meddler):  # noqa: N801 - the part that is exchanged, as the attribute is named
        first: Context | None = None

        class wire(Wire):  # noqa: N801
            def __init__(self, sink: Sink, transport: Meddler) -> None:
                super().__init__(sink, transport)
                assert isinstance(transport, TestTellsInTheContextOfTheFirstCall.transport)
                self.context = transport.first = transport.first or copy_context()

            def event(self, item: Annotated[Any]) -> None:
                self.context.copy().run(self.sink.event, item)

    FAILS = frozenset({"test_what_a_call_is_told_is_told_in_its_own_context"})


class TestForgetsTheFlag(Broken):
    class transport(Meddler):  # noqa: N801
        class wire(Wire):  # noqa: N801
            def event(self, item: Annotated[Any]) -> None:
                if not item.is_complete_final():
                    self.sink.event(item)

    FAILS = frozenset(
        {
            "test_the_flag_comes_once_and_after_all_items",
            "test_a_stream_without_items_is_complete",
            "test_the_flag_follows_an_error_item_too",
            "test_what_a_drained_endpoint_has_said_arrives_though_its_transport_is_closed_at_once",
        }
    )


class TestSendsTheFlagTwice(Broken):
    class transport(Meddler):  # noqa: N801
        class wire(Wire):  # noqa: N801
            def event(self, item: Annotated[Any]) -> None:
                self.sink.event(item)
                if item.is_complete_final():
                    self.sink.event(item)

    FAILS = frozenset({"test_the_flag_comes_once_and_after_all_items"})


class TestDropsTheFlagAfterAnError(Broken):
    class transport(Meddler):  # noqa: N801
        class wire(Wire):  # noqa: N801
            failed = False

            def event(self, item: Annotated[Any]) -> None:
                if not (item.is_complete_final() and self.failed):
                    self.sink.event(item)
                self.failed = self.failed or item.is_error()

    FAILS = frozenset({"test_the_flag_follows_an_error_item_too"})


class TestReorders(BrokenPayloads):
    class transport(Meddler):  # noqa: N801
        class wire(Wire):  # noqa: N801
            held: Any = None

            def data(self, item: Any) -> None:
                if isinstance(item, Tick) and item.number == 100:
                    self.held = item
                    return
                self.sink.data(item)
                if self.held is not None:
                    held, self.held = self.held, None
                    self.sink.data(held)

    FAILS = frozenset(
        {
            "test_items_arrive_in_the_order_they_were_yielded",
            "test_a_resumed_stream_goes_on_without_loss",
        }
    )


class TestPutsAnnotationsLast(Broken):
    class transport(Meddler):  # noqa: N801
        class wire(Wire):  # noqa: N801
            held: Any = None

            def event(self, item: Annotated[Any]) -> None:
                if item.event == "llm_metrics":
                    self.held = item
                    return
                if self.held is not None:
                    self.sink.event(self.held)
                self.sink.event(item)

    FAILS = frozenset({"test_annotations_keep_their_place_among_the_items"})


class TestClosesTwice(Broken):
    class transport(Meddler):  # noqa: N801
        class wire(Wire):  # noqa: N801
            def closed(self, error: DynamoError | None) -> None:
                self.sink.closed(error)
                self.sink.closed(error)

    FAILS = frozenset(
        {
            "test_closed_is_called_once_and_nothing_follows_it",
            "test_after_closing_the_sink_is_told_the_end_once_and_no_more",
            "test_closing_twice_at_once_and_later_is_safe",
            "test_closing_the_endpoint_ends_its_streams_with_an_error",
            "test_closing_the_serving_transport_ends_all_streams_with_an_error",
            "test_a_source_can_be_closed_after_its_transport",
        }
    )


class TestClosesACompleteStreamWithAnError(Broken):
    class transport(Meddler):  # noqa: N801
        class wire(Wire):  # noqa: N801
            def closed(self, error: DynamoError | None) -> None:
                self.sink.closed(error or Disconnected("the socket was closed"))

    FAILS = frozenset({"test_a_complete_stream_is_closed_without_an_error"})


class TestEndsWellWhatWasCut(Broken):
    class transport(Meddler):  # noqa: N801
        class wire(Wire):  # noqa: N801
            def closed(self, error: DynamoError | None) -> None:
                if error is not None:
                    self.sink.event(Annotated.from_complete_final())
                self.sink.closed(None)

    FAILS = frozenset(
        {
            "test_closing_the_endpoint_ends_its_streams_with_an_error",
            "test_closing_the_serving_transport_ends_all_streams_with_an_error",
            "test_closing_the_calling_transport_ends_all_streams_and_their_handlers",
        }
    )


class TestLosesTheTypeOfErrors(Broken):
    class transport(Meddler):  # noqa: N801
        class wire(Wire):  # noqa: N801
            def event(self, item: Annotated[Any]) -> None:
                self.sink.event(Annotated.from_error(str(item.to_error())) if item.is_error() else item)

    FAILS = frozenset({"test_an_error_in_mid_stream_keeps_its_type_its_details_and_its_causes"})


class TestLosesTheCausesOfRefusals(Broken):
    class transport(Meddler):  # noqa: N801
        def refused(self, error: BaseException, sink: Sink) -> None:
            error.__cause__ = None

    FAILS = frozenset({"test_a_refusal_keeps_its_type_its_details_and_its_causes"})


class TestTellsTheSinkOfARefusal(Broken):
    class transport(Meddler):  # noqa: N801
        def refused(self, error: BaseException, sink: Sink) -> None:
            if isinstance(error, DynamoError):
                sink.closed(error)

    FAILS = frozenset({"test_a_refused_call_leaves_the_sink_untouched"})


class TestTellsTheSinkOfACancelledCall(Broken):
    class transport(Meddler):  # noqa: N801
        def refused(self, error: BaseException, sink: Sink) -> None:
            if isinstance(error, asyncio.CancelledError):
                sink.closed(None)

    FAILS = frozenset({"test_a_call_cancelled_before_its_acceptance_leaves_the_sink_untouched"})


class TestTellsInternals(Broken):
    class transport(Meddler):  # noqa: N801
        class wire(Wire):  # noqa: N801
            def event(self, item: Annotated[Any]) -> None:
                if item.is_error() and type(error := item.to_error()) is Unknown and error.__cause__ is not None:
                    error = Unknown(f"{error.message}\nTraceback: engine.py, line 12", cause=error.__cause__)
                    item = Annotated.from_error(error)
                self.sink.event(item)

    FAILS = frozenset(
        {
            "test_a_foreign_exception_in_mid_stream_is_an_unknown_error_with_its_text",
            "test_an_error_in_mid_stream_keeps_its_type_its_details_and_its_causes",
        }
    )


class TestForgetsTheMetadata(Broken):
    class transport(Meddler):  # noqa: N801
        def context(self, ctx: EngineContext) -> EngineContext:
            bare = EngineContext(ctx.id, attempt_id=ctx.attempt_id)
            ctx.link_child(bare)
            return bare

    FAILS = frozenset({"test_ids_and_metadata_reach_the_handler"})


class TestIgnoresTheCallersContext(Broken):
    class transport(Meddler):  # noqa: N801
        def context(self, ctx: EngineContext) -> EngineContext:
            return EngineContext(ctx.id, attempt_id=ctx.attempt_id, metadata=ctx.metadata)

    FAILS = frozenset(
        {
            "test_stopping_the_callers_context_stops_the_handlers",
            "test_killing_the_callers_context_kills_the_handlers",
            "test_a_stop_before_the_acceptance_reaches_the_handler",
            "test_a_context_that_is_stopped_already_never_runs_a_handler_unstopped",
            "test_a_paused_stream_can_be_stopped_by_its_context",
            # These end a stream of their own by its context.
            "test_a_draining_endpoint_refuses_new_calls",
            "test_closing_one_endpoint_leaves_another_alone",
        }
    )


class TestStopsInsteadOfKilling(Broken):
    class transport(Meddler):  # noqa: N801
        def context(self, ctx: EngineContext) -> EngineContext:
            mild = EngineContext(ctx.id, attempt_id=ctx.attempt_id, metadata=ctx.metadata)
            ctx.on_stop(mild.stop_generating)
            return mild

    FAILS = frozenset({"test_killing_the_callers_context_kills_the_handlers"})


class TestSwallowsStop(Broken):
    class transport(Meddler):  # noqa: N801
        class grip(Grip):  # noqa: N801
            def stop(self) -> None:
                pass

    FAILS = frozenset(
        {"test_after_source_stop_the_stream_ends_by_itself", "test_a_handler_that_does_not_stop_is_cancelled"}
    )


class TestClosesWithoutStopping(Broken):
    class transport(Meddler):  # noqa: N801
        class grip(Grip):  # noqa: N801
            async def aclose(self) -> None:
                if (call := self.source._call) is not None:  # type: ignore[attr-defined]
                    call.lost()

    FAILS = frozenset(
        {
            "test_closing_an_unfinished_call_stops_the_handler_once",
            "test_closing_runs_every_finally_of_the_handler",
            "test_stopping_one_of_many_streams_leaves_the_others_alone",
        }
    )


class TestClosesWithoutWaiting(Broken):
    class transport(Meddler):  # noqa: N801
        class grip(Grip):  # noqa: N801
            async def aclose(self) -> None:
                self.source.stop()

    FAILS = frozenset({"test_closing_runs_every_finally_of_the_handler"})


class TestGivesTheHandlerAnotherContext(Broken):
    """What handlers defer is never run."""

    class transport(Meddler):  # noqa: N801
        def handler(self, handler: Handler) -> Handler:
            async def other(request: Any, ctx: ServedContext) -> AsyncGenerator[Any, None]:
                copy = ServedContext(ctx.id, attempt_id=ctx.attempt_id, metadata=ctx.metadata)
                ctx.link_child(copy)
                return await handler(request, copy)

            return other

    FAILS = frozenset(
        {
            "test_what_is_deferred_runs_once_when_the_call_has_ended",
            "test_what_was_deferred_by_a_refused_call_has_run_once",
            "test_closing_the_endpoint_ends_its_handlers",
            # These wait for the end of a handler.
            "test_what_a_drained_endpoint_has_said_arrives_though_its_transport_is_closed_at_once",
            "test_closing_an_unfinished_call_stops_the_handler_once",
            "test_a_stop_before_the_acceptance_reaches_the_handler",
            "test_a_context_that_is_stopped_already_never_runs_a_handler_unstopped",
            "test_a_call_cancelled_before_its_acceptance_ends_its_handler",
            "test_a_call_cancelled_before_its_acceptance_leaves_the_sink_untouched",
            "test_a_paused_stream_can_be_closed",
            "test_a_paused_stream_can_be_stopped_by_its_context",
        }
    )


class TestIgnoresPause(Broken):
    class transport(Meddler):  # noqa: N801
        class grip(Grip):  # noqa: N801
            def pause(self) -> None:
                pass

    FAILS = frozenset({"test_a_paused_stream_waits_while_others_go_on"})


class TestKeepsAllThatAPausedStreamSends(Broken):
    class transport(Meddler):  # noqa: N801
        class wire(Wire):  # noqa: N801
            def __init__(self, sink: Sink, transport: Meddler) -> None:
                super().__init__(sink, transport)
                self.kept: list[tuple[str, Any]] | None = None

            def data(self, item: Any) -> None:
                self._tell("data", item)

            def event(self, item: Annotated[Any]) -> None:
                self._tell("event", item)

            def closed(self, error: DynamoError | None) -> None:
                self._tell("closed", error)

            def _tell(self, kind: str, what: Any) -> None:
                if self.kept is None:
                    getattr(self.sink, kind)(what)
                else:
                    self.kept.append((kind, what))

        class grip(Grip):  # noqa: N801
            wire: TestKeepsAllThatAPausedStreamSends.transport.wire

            def pause(self) -> None:
                self.wire.kept = self.wire.kept or []

            def resume(self) -> None:
                kept, self.wire.kept = self.wire.kept or [], None
                for kind, what in kept:
                    getattr(self.wire.sink, kind)(what)

            def stop(self) -> None:
                self.resume()
                super().stop()

            async def aclose(self) -> None:
                self.resume()
                await super().aclose()

    FAILS = frozenset({"test_a_paused_stream_waits_while_others_go_on"})


class TestLosesAnItemWhenResumed(Broken):
    class transport(Meddler):  # noqa: N801
        class wire(Wire):  # noqa: N801
            lose = False

            def data(self, item: Any) -> None:
                if self.lose:
                    self.lose = False
                else:
                    self.sink.data(item)

        class grip(Grip):  # noqa: N801
            wire: TestLosesAnItemWhenResumed.transport.wire

            def resume(self) -> None:
                self.wire.lose = True
                super().resume()

    FAILS = frozenset({"test_a_resumed_stream_goes_on_without_loss"})


class TestMixesStreams(Broken):
    class transport(Meddler):  # noqa: N801
        class wire(Wire):  # noqa: N801
            strays: ClassVar[list[Any]] = []

            def data(self, item: Any) -> None:
                if isinstance(item, Tick) and item.number == 25 and item.stream > 1:
                    self.strays.append(item)
                    item = self.strays.pop(0) if len(self.strays) > 1 else item
                self.sink.data(item)

    FAILS = frozenset({"test_many_streams_at_once_do_not_mix"})


class TestStopsTheWrongStream(Broken):
    class transport(Meddler):  # noqa: N801
        class grip(Grip):  # noqa: N801
            async def aclose(self) -> None:
                sources = self.wire.transport.sources
                if len(sources) == 8:
                    sources[-1].stop()
                await super().aclose()

    FAILS = frozenset({"test_stopping_one_of_many_streams_leaves_the_others_alone"})


class TestAnswersForOthers(Broken):
    class transport(Meddler):  # noqa: N801
        def instance(self, instance: Instance) -> Instance:
            known = {instance_id for instance_id, _ in self._served}
            if instance.instance_id not in known and known:
                return msgspec.structs.replace(instance, instance_id=min(known))
            return instance

    FAILS = frozenset({"test_an_instance_that_is_not_there_cannot_be_connected_to"})


class TestAcceptsWhileDraining(Broken):
    class transport(Meddler):  # noqa: N801
        class office(Office):  # noqa: N801
            async def drain(self, timeout: float) -> bool:
                return await self.served._calls.join(timeout)  # type: ignore[attr-defined, no-any-return]

    FAILS = frozenset({"test_a_draining_endpoint_refuses_new_calls"})


class TestCutsWhatItShouldDrain(Broken):
    class transport(Meddler):  # noqa: N801
        class office(Office):  # noqa: N801
            async def drain(self, timeout: float) -> bool:
                await self.served._calls.aclose()  # type: ignore[attr-defined]
                return await self.served.drain(timeout)

    FAILS = frozenset({"test_draining_lets_what_runs_finish", "test_draining_tells_when_the_time_was_too_short"})


class TestSaysDrainedTooSoon(Broken):
    class transport(Meddler):  # noqa: N801
        class office(Office):  # noqa: N801
            async def drain(self, timeout: float) -> bool:
                await self.served.drain(timeout)
                return True

    FAILS = frozenset({"test_draining_tells_when_the_time_was_too_short"})


class TestTakesTheWholeTimeToDrain(Broken):
    class transport(Meddler):  # noqa: N801
        class office(Office):  # noqa: N801
            async def drain(self, timeout: float) -> bool:
                idle = not self.served._calls  # type: ignore[attr-defined]
                in_time = await self.served.drain(timeout)
                if idle:
                    await asyncio.sleep(timeout)
                return in_time

    FAILS = frozenset(
        {
            "test_an_endpoint_without_calls_is_drained_at_once",
            "test_what_a_drained_endpoint_has_said_arrives_though_its_transport_is_closed_at_once",
        }
    )


class TestDropsWhatWaitsWhenItCloses(Broken):
    class transport(Meddler):  # noqa: N801
        def __init__(self) -> None:
            super().__init__()
            self.waiting: set[TestDropsWhatWaitsWhenItCloses.transport.wire] = set()

        async def aclose(self) -> None:
            for wire in self.waiting:
                wire.sink.closed(Disconnected("the transport is closed"))
            self.waiting.clear()
            await super().aclose()

        class wire(Wire):  # noqa: N801
            transport: TestDropsWhatWaitsWhenItCloses.transport
            items = 0

            def data(self, item: Any) -> None:
                self.items += 1
                self.sink.data(item)

            def event(self, item: Annotated[Any]) -> None:
                if item.is_complete_final() and self.items == 3:
                    self.transport.waiting.add(self)
                    asyncio.get_running_loop().call_later(0.02, self.let_go, item)
                else:
                    self.sink.event(item)

            def closed(self, error: DynamoError | None) -> None:
                if self not in self.transport.waiting:
                    self.sink.closed(error)

            def let_go(self, item: Annotated[Any]) -> None:
                if self in self.transport.waiting:
                    self.transport.waiting.remove(self)
                    self.sink.event(item)
                    self.sink.closed(None)

    FAILS = frozenset({"test_what_a_drained_endpoint_has_said_arrives_though_its_transport_is_closed_at_once"})


class TestLeavesTasksBehind(Broken):
    class transport(Meddler):  # noqa: N801
        def context(self, ctx: EngineContext) -> EngineContext:
            TaskSet().spawn(asyncio.sleep(60), name="forgotten")
            return ctx

    FAILS = frozenset({"test_transports_can_be_closed_twice_and_leave_no_task_behind"})


class TestCutsLargeItemsShort(BrokenPayloads):
    class transport(Meddler):  # noqa: N801
        class wire(Wire):  # noqa: N801
            def data(self, item: Any) -> None:
                if isinstance(item, Tick) and len(item.pad) > 512 * 1024:
                    item = Tick(item.number, item.stream, item.pad[: 512 * 1024])
                self.sink.data(item)

    FAILS = frozenset({"test_a_request_and_an_item_of_a_mebibyte_arrive"})


class TestLosesAFieldOfRequests(BrokenPayloads):
    class transport(Meddler):  # noqa: N801
        def request(self, request: Any) -> Any:
            if isinstance(request, PreprocessedRequest):
                return msgspec.structs.replace(request, migration_link=None)
            return request

    FAILS = frozenset({"test_a_request_arrives_as_it_was_sent"})


class TestLosesLogprobs(BrokenPayloads):
    class transport(Meddler):  # noqa: N801
        class wire(Wire):  # noqa: N801
            def data(self, item: Any) -> None:
                if isinstance(item, LLMEngineOutput):
                    item = msgspec.structs.replace(item, top_logprobs=None)
                self.sink.data(item)

    FAILS = frozenset({"test_outputs_arrive_as_they_were_sent"})


class TestDropsEmptyItems(BrokenPayloads):
    class transport(Meddler):  # noqa: N801
        class wire(Wire):  # noqa: N801
            def data(self, item: Any) -> None:
                if item != LLMEngineOutput():
                    self.sink.data(item)

    FAILS = frozenset({"test_outputs_arrive_as_they_were_sent"})


class TestAnswersBeforeItIsAccepted(Broken):
    class transport(Meddler):  # noqa: N801
        def handler(self, handler: Handler) -> Handler:
            async def eager(request: Any, ctx: ServedContext) -> AsyncGenerator[Any, None]:
                async def items() -> AsyncGenerator[Any, None]:
                    async with aclosing(await handler(request, ctx)) as inner:
                        async for item in inner:
                            yield item

                return items()

            return eager

    FAILS = frozenset(
        {
            "test_a_call_does_not_return_before_it_is_accepted",
            "test_a_refusal_keeps_its_type_its_details_and_its_causes",
            "test_a_refused_call_leaves_the_sink_untouched",
            "test_a_foreign_exception_instead_of_an_acceptance_is_an_unknown_refusal",
            "test_after_a_refusal_the_next_call_is_served",
            "test_what_was_deferred_by_a_refused_call_has_run_once",
            "test_a_call_cancelled_before_its_acceptance_ends_its_handler",
            "test_a_call_cancelled_before_its_acceptance_leaves_the_sink_untouched",
        }
    )


class TestAnswersWithTheFirstItem(Broken):
    class transport(Meddler):  # noqa: N801
        class wire(Wire):  # noqa: N801
            def __init__(self, sink: Sink, transport: Meddler) -> None:
                super().__init__(sink, transport)
                self.touched = asyncio.Event()

            def data(self, item: Any) -> None:
                self.touched.set()
                self.sink.data(item)

            def event(self, item: Annotated[Any]) -> None:
                self.touched.set()
                self.sink.event(item)

        async def call(
            self, instance: Instance, endpoint: Endpoint, request: Any, ctx: EngineContext, sink: Sink
        ) -> Source:
            source = await super().call(instance, endpoint, request, ctx, sink)
            assert isinstance(source, Grip)
            assert isinstance(source.wire, TestAnswersWithTheFirstItem.transport.wire)
            await source.wire.touched.wait()
            return source

    FAILS = frozenset({"test_a_call_returns_when_it_is_accepted_even_if_no_item_comes"})


class TestRefusesForEver(Broken):
    class transport(Meddler):  # noqa: N801
        first: BaseException | None = None

        def request(self, request: Any) -> Any:
            if self.first is not None:
                raise self.first
            return request

        def refused(self, error: BaseException, sink: Sink) -> None:
            self.first = error

    FAILS = frozenset({"test_after_a_refusal_the_next_call_is_served"})


class TestPassesForeignExceptionsOn(Broken):
    class transport(Meddler):  # noqa: N801
        def refused(self, error: BaseException, sink: Sink) -> None:
            if isinstance(error, Unknown) and isinstance(error.__cause__, KeyError):
                raise error.__cause__ from None

    FAILS = frozenset({"test_a_foreign_exception_instead_of_an_acceptance_is_an_unknown_refusal"})


class TestAnswersForAnotherEndpoint(Broken):
    class transport(Meddler):  # noqa: N801
        def endpoint(self, endpoint: Endpoint) -> Endpoint:
            return COUNT if endpoint.name == "other" else endpoint

    FAILS = frozenset({"test_an_endpoint_that_is_not_served_cannot_be_connected_to"})


class TestMixesEndpoints(Broken):
    class transport(Meddler):  # noqa: N801
        def endpoint(self, endpoint: Endpoint) -> Endpoint:
            if endpoint.name == "second":
                return Endpoint("first", endpoint.request_type, endpoint.item_type)
            return endpoint

    FAILS = frozenset({"test_every_endpoint_and_every_instance_gets_its_own_calls"})


class TestServesAfterClosing(Broken):
    class transport(Meddler):  # noqa: N801
        class office(Office):  # noqa: N801
            async def aclose(self) -> None:
                await self.served._calls.aclose()  # type: ignore[attr-defined]

    FAILS = frozenset({"test_an_endpoint_that_was_closed_cannot_be_called"})


class TestWaitsLongForAHandlerThatDoesNotStop(Broken):
    class transport(Meddler):  # noqa: N801
        class grip(Grip):  # noqa: N801
            async def aclose(self) -> None:
                loop = asyncio.get_running_loop()
                begun = loop.time()
                await super().aclose()
                if loop.time() - begun >= 0.05:
                    await asyncio.sleep(60)

    FAILS = frozenset({"test_closing_does_not_wait_for_ever_on_a_handler_that_does_not_stop"})


class TestStopsWhatHasEnded(Broken):
    class transport(Meddler):  # noqa: N801
        class grip(Grip):  # noqa: N801
            def __init__(self, source: Source, wire: Wire) -> None:
                super().__init__(source, wire)
                self.ctx = source._call._ctx  # type: ignore[attr-defined]

            def stop(self) -> None:
                super().stop()
                self.ctx.stop_generating()

    FAILS = frozenset({"test_the_source_of_a_finished_stream_can_be_used_without_effect"})


class TestLetsErrorsOvertakeItems(Broken):
    class transport(Meddler):  # noqa: N801
        class wire(Wire):  # noqa: N801
            held: Any = None

            def data(self, item: Any) -> None:
                self._let_go()
                if item == Tick(1):
                    self.held = item
                else:
                    self.sink.data(item)

            def event(self, item: Annotated[Any]) -> None:
                if not item.is_error():
                    self._let_go()
                self.sink.event(item)

            def closed(self, error: DynamoError | None) -> None:
                self._let_go()
                self.sink.closed(error)

            def _let_go(self) -> None:
                held, self.held = self.held, None
                if held is not None:
                    self.sink.data(held)

    FAILS = frozenset({"test_what_came_before_an_error_arrives_before_it"})


class TestRoundsEmbeddings(BrokenPayloads):
    class transport(Meddler):  # noqa: N801
        class wire(Wire):  # noqa: N801
            def data(self, item: Any) -> None:
                if isinstance(item, EmbedOutput):
                    rounded = [list(array("f", vector)) for vector in item.embeddings]
                    item = msgspec.structs.replace(item, embeddings=rounded)
                self.sink.data(item)

    FAILS = frozenset({"test_embeddings_arrive_as_they_were_sent"})


class TestLosesAFieldOfItemsItDoesNotKnow(BrokenPayloads):
    class transport(Meddler):  # noqa: N801
        class wire(Wire):  # noqa: N801
            def data(self, item: Any) -> None:
                self.sink.data(msgspec.structs.replace(item, sizes={}) if isinstance(item, Parcel) else item)

    FAILS = frozenset({"test_types_of_an_endpoints_own_arrive_as_they_were_sent"})


class Limited(Meddler):
    """Carries no more than 4096 bytes."""

    def request(self, request: Any) -> Any:
        if isinstance(request, Ask) and len(request.pad) == 4097:
            raise InvalidArgument("the request is larger than 4096 bytes")
        return request

    def handler(self, handler: Handler) -> Handler:
        async def limited(request: Any, ctx: ServedContext) -> AsyncGenerator[Any, None]:
            async def checked(items: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
                try:
                    async for item in items:
                        if isinstance(item, Tick) and len(item.pad) == 4097:
                            raise InvalidArgument("an item is larger than 4096 bytes")
                        yield item
                finally:
                    await items.aclose()

            return checked(await handler(request, ctx))

        return limited


class TestHasALimit(BrokenPayloads):
    transport = Limited
    ITEM_LIMIT = 4096


class TestDropsWhatIsTooLarge(BrokenPayloads):
    ITEM_LIMIT = 4096

    class transport(Meddler):  # noqa: N801
        class wire(Wire):  # noqa: N801
            def data(self, item: Any) -> None:
                if not (isinstance(item, Tick) and len(item.pad) == 4097):
                    self.sink.data(item)

    FAILS = frozenset(
        {
            "test_an_item_that_is_too_large_ends_its_own_stream_only_with_an_error",
            "test_a_request_that_is_too_large_is_refused_and_other_calls_go_on",
        }
    )


class Brittle(Broken):
    """With a connection to break."""

    CAN_BREAK_CONNECTION = True

    async def break_connection(self, planes: Planes) -> None:
        assert isinstance(planes.client, Meddler)
        for source in planes.client.sources:
            self.cut(source._call)  # type: ignore[attr-defined]

    def cut(self, call: Any) -> None:
        call.lost()


class TestLosesItsConnection(Brittle):
    pass


class TestTakesALostConnectionForAStop(Brittle):
    def cut(self, call: Any) -> None:
        call.stop()
        call.lost()

    FAILS = frozenset({"test_a_broken_connection_ends_the_handler_without_a_stop"})


class TestKeepsHandlersOfALostConnection(Brittle):
    async def break_connection(self, planes: Planes) -> None:
        assert isinstance(planes.client, Meddler)
        for source in planes.client.sources:
            sink, source._sink = source._sink, None  # type: ignore[attr-defined]
            sink.closed(Disconnected("lost"))

    FAILS = frozenset(
        {
            "test_a_broken_connection_ends_the_handler_without_a_stop",
            # The check breaks the connection, and its context is no call's.
            "test_a_broken_connection_is_told_to_each_call_in_its_own_context",
        }
    )


class TestCallsALostConnectionSomethingElse(Brittle):
    class transport(Meddler):  # noqa: N801
        class wire(Wire):  # noqa: N801
            def closed(self, error: DynamoError | None) -> None:
                self.sink.closed(error and StreamIncomplete("the stream ended"))

    FAILS = frozenset({"test_a_broken_connection_is_told_to_every_stream"})


class TestTellsOfALostConnectionInTheContextOfItsReader(Brittle):
    class transport(Meddler):  # noqa: N801
        class wire(Wire):  # noqa: N801
            def closed(self, error: DynamoError | None) -> None:
                if isinstance(error, Disconnected):
                    Context().run(self.sink.closed, error)
                else:
                    self.sink.closed(error)

    FAILS = frozenset({"test_a_broken_connection_is_told_to_each_call_in_its_own_context"})


class TestDoesNotConnectAgain(Brittle):
    async def break_connection(self, planes: Planes) -> None:
        await super().break_connection(planes)
        assert isinstance(planes.client, Meddler)
        planes.client._served.clear()

    FAILS = frozenset({"test_after_a_broken_connection_the_next_call_connects_anew"})


class Lossy(Broken):
    """With items that can be lost on the way."""

    CAN_LOSE_AN_ITEM = True

    async def lose_an_item(self, planes: Planes) -> None:
        assert isinstance(planes.client, Meddler)
        planes.client.losing = True


class LosingWire(Wire):
    """Loses the next item when told to, and notices: what it carries is numbered."""

    over = False

    def data(self, item: Any) -> None:
        if self.transport.losing:
            self.transport.losing = False
            self.over = True
            self.sink.closed(StreamIncomplete("an item is missing"))
            self.transport.sources[-1].stop()
        elif not self.over:
            self.sink.data(item)

    def event(self, item: Annotated[Any]) -> None:
        if not self.over:
            self.sink.event(item)

    def closed(self, error: DynamoError | None) -> None:
        if not self.over:
            self.sink.closed(error)


class TestNoticesALoss(Lossy):
    class transport(Meddler):  # noqa: N801
        wire = LosingWire


class TestDoesNotNoticeALoss(Lossy):
    class transport(Meddler):  # noqa: N801
        class wire(Wire):  # noqa: N801
            def data(self, item: Any) -> None:
                if self.transport.losing:
                    self.transport.losing = False
                else:
                    self.sink.data(item)

    FAILS = frozenset({"test_an_item_lost_on_the_way_is_noticed"})


class TestGoesOnAfterALoss(Lossy):
    class transport(Meddler):  # noqa: N801
        class wire(LosingWire):  # noqa: N801
            def data(self, item: Any) -> None:
                if self.over:
                    self.sink.data(item)
                elif self.transport.losing:
                    self.over = True
                    self.sink.closed(StreamIncomplete("an item is missing"))
                else:
                    super().data(item)

    FAILS = frozenset({"test_an_item_lost_on_the_way_is_noticed"})
