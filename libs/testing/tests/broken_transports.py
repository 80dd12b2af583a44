"""Transports that break one promise each, and what of the kit must find it.

Not collected with the other tests: `test_kits_on_broken_parts` runs this file and compares.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from contextvars import Context, copy_context
from typing import Any

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
from dynamo_testing.transport.caller_cancellation import StopChecks
from dynamo_testing.transport.contexts import ContextChecks
from dynamo_testing.transport.endings import EndChecks
from dynamo_testing.transport.errors import ErrorChecks
from dynamo_testing.transport.flow import FlowChecks
from dynamo_testing.transport.harness import COUNT, Ask, Planes, Tick
from dynamo_testing.transport.payloads import Parcel, PayloadChecks
from dynamo_testing.transport.streams import StreamChecks

from libs.testing.tests.planted import (
    Planted,
    Proxy,
    adding,
    drops,
    first,
    maps,
    mutant,
    nothing,
    own,
    put,
    then,
    twice,
)


class Meddler(InprocTransport):
    """A transport without a fault: what is changed is put before its parts and on the way of what they are given."""

    #: Before the sink of a call, its source, and what is served.
    wire: type[Any] = Proxy
    grip: type[Any] = Proxy
    office: type[Any] = Proxy

    def __init__(self) -> None:
        super().__init__(PluginConfig(), Metrics())
        self.sources: list[Source] = []
        self.losing = False

    def given(self, value: Any) -> Any:
        return value

    context = handler = instance = endpoint = request = given

    def refused(self, error: BaseException, sink: Sink) -> None:
        """Be told that a call was refused or cancelled; the error is raised next."""

    async def serve(self, instance_id: int, endpoint: Endpoint, handler: Handler) -> Served:
        return self.office(await super().serve(instance_id, endpoint, self.handler(handler)), self)  # type: ignore[no-any-return]

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
        return self.grip(source, wire)  # type: ignore[no-any-return]


class Broken(Planted, StreamChecks, ErrorChecks, StopChecks, FlowChecks, EndChecks, ContextChecks):
    """The kit over one transport; without the slow checks of what payloads look like."""

    PART = Meddler
    #: The seconds that a check waits which must fail, and any other.
    PATIENCE = (0.2, 10.0)

    @pytest.fixture
    async def planes(self) -> AsyncIterator[Planes]:
        transport = self.PART()
        yield Planes(server=transport, client=transport)
        await transport.aclose()


class BrokenPayloads(Broken, PayloadChecks):
    """The whole kit."""


class TestWithoutAFault(BrokenPayloads):
    pass


def wire(**changes: Any) -> type[Any]:
    """Return what tells a sink other things: a change is called in place of its method."""
    return mutant(Proxy, **changes)


def ended(item: Annotated[Any]) -> bool:
    return item.is_complete_final()


TestHandsOverWhatCannotBeEncoded = BrokenPayloads.failing(
    "test_an_item_that_cannot_be_encoded_ends_its_own_stream_only_with_an_error",
    "test_an_item_of_another_type_than_the_caller_expects_makes_the_stream_incomplete",
    "test_a_request_of_the_wrong_type_is_refused",
    CROSS_PROCESS=True,
)


def remember_the_first_context(real: Any, self: Any, sink: Sink, transport: Any) -> None:
    real(sink, transport)
    self.context = transport.first = transport.first or copy_context()


TestTellsInTheContextOfTheFirstCall = Broken.failing(
    "test_callbacks_of_a_call_run_in_its_own_context",
    first=None,
    wire=wire(__init__=remember_the_first_context, event=lambda real, self, item: self.context.copy().run(real, item)),
)
TestForgetsTheFlag = Broken.failing(
    "test_the_flag_comes_once_and_after_all_items",
    "test_a_stream_without_items_is_complete",
    "test_the_flag_follows_an_error_item_too",
    "test_output_of_a_drained_endpoint_arrives_before_the_close",
    wire=wire(event=drops(ended)),
)
TestSendsTheFlagTwice = Broken.failing("test_the_flag_comes_once_and_after_all_items", wire=wire(event=twice(ended)))


def drop_the_flag_after_an_error(real: Any, self: Any, item: Annotated[Any]) -> None:
    if not (ended(item) and self.failed):
        real(item)
    self.failed = self.failed or item.is_error()


TestDropsTheFlagAfterAnError = Broken.failing(
    "test_the_flag_follows_an_error_item_too", wire=wire(failed=False, event=drop_the_flag_after_an_error)
)


def hold(real: Any, self: Any, item: Any) -> None:
    """Send item 100 after the next one."""
    held, self.held = self.held, [item] if isinstance(item, Tick) and item.number == 100 else []
    for one in [*([] if self.held else [item]), *held]:
        real(one)


TestReorders = BrokenPayloads.failing(
    "test_items_arrive_in_the_order_they_were_yielded",
    "test_a_resumed_stream_goes_on_without_loss",
    wire=wire(held=[], data=hold),
)


def put_annotations_last(real: Any, self: Any, item: Annotated[Any]) -> None:
    if item.event == "llm_metrics":
        self.held = [item]
    else:
        for one in [*self.held, item]:
            real(one)


TestPutsAnnotationsLast = Broken.failing(
    "test_annotations_keep_their_place_among_the_items", wire=wire(held=[], event=put_annotations_last)
)
TestClosesTwice = Broken.failing(
    "test_closed_is_called_once_and_nothing_follows_it",
    "test_a_closed_call_ends_its_sink_exactly_once",
    "test_closing_twice_at_once_and_later_is_safe",
    "test_closing_the_endpoint_ends_its_streams_with_an_error",
    "test_closing_the_serving_transport_ends_all_streams_with_an_error",
    "test_a_source_can_be_closed_after_its_transport",
    wire=wire(closed=twice()),
)
TestClosesACompleteStreamWithAnError = Broken.failing(
    "test_a_complete_stream_is_closed_without_an_error",
    wire=wire(closed=maps(lambda error: error or Disconnected("the socket was closed"))),
)
TestEndsWellWhatWasCut = Broken.failing(
    "test_closing_the_endpoint_ends_its_streams_with_an_error",
    "test_closing_the_serving_transport_ends_all_streams_with_an_error",
    "test_closing_the_calling_transport_ends_all_streams_and_their_handlers",
    wire=wire(
        closed=lambda real, self, error: (error and self.inner.event(Annotated.from_complete_final()), real(None))
    ),
)
TestLosesTheTypeOfErrors = Broken.failing(
    "test_an_error_in_mid_stream_keeps_its_type_its_details_and_its_causes",
    wire=wire(event=maps(lambda item: Annotated.from_error(str(item.to_error())) if item.is_error() else item)),
)
TestLosesTheCausesOfRefusals = Broken.failing(
    "test_a_refusal_keeps_its_type_its_details_and_its_causes",
    refused=lambda real, self, error, sink: setattr(error, "__cause__", None),
)
TestTellsTheSinkOfARefusal = Broken.failing(
    "test_a_refused_call_leaves_the_sink_untouched",
    refused=lambda real, self, error, sink: isinstance(error, DynamoError) and sink.closed(error),
)
TestTellsTheSinkOfACancelledCall = Broken.failing(
    "test_a_call_cancelled_before_its_acceptance_leaves_the_sink_untouched",
    refused=lambda real, self, error, sink: isinstance(error, asyncio.CancelledError) and sink.closed(None),
)


def with_internals(item: Annotated[Any]) -> Annotated[Any]:
    if item.is_error() and type(error := item.to_error()) is Unknown and error.__cause__ is not None:
        return Annotated.from_error(Unknown(f"{error.message}\nTraceback: engine.py, line 12", cause=error.__cause__))
    return item


TestTellsInternals = Broken.failing(
    "test_a_foreign_exception_in_mid_stream_is_an_unknown_error_with_its_text",
    "test_an_error_in_mid_stream_keeps_its_type_its_details_and_its_causes",
    wire=wire(event=maps(with_internals)),
)


def linked(ctx: Any, copy: Any) -> Any:
    ctx.link_child(copy)
    return copy


TestForgetsTheMetadata = Broken.failing(
    "test_ids_and_metadata_reach_the_handler",
    context=lambda real, self, ctx: linked(ctx, EngineContext(ctx.id, attempt_id=ctx.attempt_id)),
)
TestIgnoresTheCallersContext = Broken.failing(
    "test_stopping_the_callers_context_stops_the_handlers",
    "test_killing_the_callers_context_kills_the_handlers",
    "test_a_stop_before_the_acceptance_reaches_the_handler",
    "test_a_context_that_is_stopped_already_never_runs_a_handler_unstopped",
    "test_a_paused_stream_can_be_stopped_by_its_context",
    # These end a stream of their own by its context.
    "test_a_draining_endpoint_refuses_new_calls",
    "test_closing_one_endpoint_leaves_another_alone",
    context=lambda real, self, ctx: EngineContext(ctx.id, attempt_id=ctx.attempt_id, metadata=ctx.metadata),
)


def stopped_only(real: Any, self: Any, ctx: EngineContext) -> EngineContext:
    mild = EngineContext(ctx.id, attempt_id=ctx.attempt_id, metadata=ctx.metadata)
    ctx.on_stop(mild.stop_generating)
    return mild


TestStopsInsteadOfKilling = Broken.failing("test_killing_the_callers_context_kills_the_handlers", context=stopped_only)
TestSwallowsStop = Broken.failing(
    "test_after_source_stop_the_stream_ends_by_itself",
    "test_a_handler_that_does_not_stop_is_cancelled",
    grip=mutant(Proxy, stop=lambda real, self: None),
)
TestClosesWithoutStopping = Broken.failing(
    "test_closing_an_unfinished_call_stops_the_handler_once",
    "test_closing_runs_every_finally_of_the_handler",
    "test_stopping_one_of_many_streams_leaves_the_others_alone",
    grip=mutant(Proxy, aclose=lambda real, self: nothing(self._call and self._call.lost())),
)
TestClosesWithoutWaiting = Broken.failing(
    "test_closing_runs_every_finally_of_the_handler",
    grip=mutant(Proxy, aclose=lambda real, self: nothing(self.inner.stop())),
)


def with_another_context(real: Any, self: Any, handler: Handler) -> Handler:
    def other(request: Any, ctx: ServedContext) -> Any:
        copy = ServedContext(ctx.id, attempt_id=ctx.attempt_id, metadata=ctx.metadata)
        return handler(request, linked(ctx, copy))

    return other


# What handlers defer is never run.
TestGivesTheHandlerAnotherContext = Broken.failing(
    "test_deferred_callbacks_run_once_after_the_call",
    "test_deferred_callbacks_of_a_refused_call_run_once",
    "test_closing_the_endpoint_ends_its_handlers",
    # These wait for the end of a handler.
    "test_output_of_a_drained_endpoint_arrives_before_the_close",
    "test_closing_an_unfinished_call_stops_the_handler_once",
    "test_a_stop_before_the_acceptance_reaches_the_handler",
    "test_a_context_that_is_stopped_already_never_runs_a_handler_unstopped",
    "test_a_call_cancelled_before_its_acceptance_ends_its_handler",
    "test_a_call_cancelled_before_its_acceptance_leaves_the_sink_untouched",
    "test_a_paused_stream_can_be_closed",
    "test_a_paused_stream_can_be_stopped_by_its_context",
    handler=with_another_context,
)
TestIgnoresPause = Broken.failing(
    "test_a_paused_stream_waits_while_others_go_on", grip=mutant(Proxy, pause=lambda real, self: None)
)


def keep(real: Any, self: Any, value: Any) -> None:
    """Keep what is told while `kept` is a list."""
    if self.kept is None:
        real(value)
    else:
        self.kept.append((real, value))


def send_kept(real: Any, self: Any) -> None:
    kept, self.owner.kept = self.owner.kept or [], None
    for tell, value in kept:
        tell(value)


TestKeepsAllThatAPausedStreamSends = Broken.failing(
    "test_a_paused_stream_waits_while_others_go_on",
    wire=wire(kept=None, data=keep, event=keep, closed=keep),
    grip=mutant(
        Proxy,
        pause=lambda real, self: setattr(self.owner, "kept", self.owner.kept or []),
        resume=send_kept,
        stop=lambda real, self: (self.resume(), real()),
        aclose=first(lambda self: self.resume()),
    ),
)


def lose_one(real: Any, self: Any, item: Any) -> None:
    if self.lose:
        self.lose = False
    else:
        real(item)


TestLosesAnItemWhenResumed = Broken.failing(
    "test_a_resumed_stream_goes_on_without_loss",
    wire=wire(lose=False, data=lose_one),
    grip=mutant(Proxy, resume=lambda real, self: (put(self.owner, lose=True), real())),
)


def stray(real: Any, self: Any, item: Any) -> None:
    if isinstance(item, Tick) and item.number == 25 and item.stream > 1:
        self.strays.append(item)
        item = self.strays.pop(0) if len(self.strays) > 1 else item
    real(item)


TestMixesStreams = Broken.failing("test_many_streams_at_once_do_not_mix", wire=wire(strays=[], data=stray))


def stop_the_last(grip: Any) -> None:
    sources = grip.owner.owner.sources
    if len(sources) == 8:
        sources[-1].stop()


TestStopsTheWrongStream = Broken.failing(
    "test_stopping_one_of_many_streams_leaves_the_others_alone", grip=mutant(Proxy, aclose=first(stop_the_last))
)


def answer_for_others(real: Any, self: Any, instance: Instance) -> Instance:
    known = {instance_id for instance_id, _ in self._served}
    return (
        instance
        if not known
        else msgspec.structs.replace(
            instance, instance_id=instance.instance_id if instance.instance_id in known else min(known)
        )
    )


TestAnswersForOthers = Broken.failing(
    "test_an_instance_that_is_not_there_cannot_be_connected_to", instance=answer_for_others
)
TestAcceptsWhileDraining = Broken.failing(
    "test_a_draining_endpoint_refuses_new_calls",
    office=mutant(Proxy, drain=lambda real, self, timeout: self._calls.join(timeout)),
)
TestCutsWhatItShouldDrain = Broken.failing(
    "test_draining_lets_running_calls_finish",
    "test_draining_reports_a_timeout",
    office=mutant(Proxy, drain=first(lambda self, timeout: self._calls.aclose())),
)


async def say_drained(real: Any, self: Any, timeout: float) -> bool:
    await real(timeout)
    return True


TestSaysDrainedTooSoon = Broken.failing("test_draining_reports_a_timeout", office=mutant(Proxy, drain=say_drained))


async def take_the_whole_time(real: Any, self: Any, timeout: float) -> Any:
    idle = not self._calls
    in_time = await real(timeout)
    await asyncio.sleep(timeout if idle else 0)
    return in_time


TestTakesTheWholeTimeToDrain = Broken.failing(
    "test_an_endpoint_without_calls_is_drained_at_once",
    "test_output_of_a_drained_endpoint_arrives_before_the_close",
    office=mutant(Proxy, drain=take_the_whole_time),
)


def end_later(real: Any, self: Any, item: Annotated[Any]) -> None:
    if ended(item) and self.items == 3:
        self.owner.waiting.append(self)
        asyncio.get_running_loop().call_later(0.02, let_go, self, item)
    else:
        real(item)


def let_go(wire: Any, item: Annotated[Any]) -> None:
    if wire in wire.owner.waiting:
        wire.owner.waiting.remove(wire)
        wire.inner.event(item)
        wire.inner.closed(None)


def cut_the_waiting(self: Any) -> None:
    while self.waiting:
        self.waiting.pop().inner.closed(Disconnected("the transport is closed"))


TestDropsWhatWaitsWhenItCloses = Broken.failing(
    "test_output_of_a_drained_endpoint_arrives_before_the_close",
    waiting=[],
    aclose=first(cut_the_waiting),
    wire=wire(
        items=0,
        data=adding("items"),
        event=end_later,
        closed=lambda real, self, error: None if self in self.owner.waiting else real(error),
    ),
)
TestLeavesTasksBehind = Broken.failing(
    "test_transports_can_be_closed_twice_and_leave_no_task_behind",
    context=maps(lambda ctx: (TaskSet().spawn(asyncio.sleep(60), name="forgotten"), ctx)[1]),
)
TestCutsLargeItemsShort = BrokenPayloads.failing(
    "test_a_request_and_an_item_of_a_mebibyte_arrive",
    wire=wire(
        data=maps(
            lambda item: Tick(item.number, item.stream, item.pad[: 512 * 1024]) if isinstance(item, Tick) else item
        )
    ),
)


def replacing(kind: type[Any], **values: Any) -> Any:
    """Return what changes fields of the values of a type."""
    return maps(lambda value: msgspec.structs.replace(value, **values) if isinstance(value, kind) else value)


TestLosesAFieldOfRequests = BrokenPayloads.failing(
    "test_a_request_arrives_as_it_was_sent", request=replacing(PreprocessedRequest, migration_link=None)
)
TestLosesLogprobs = BrokenPayloads.failing(
    "test_outputs_arrive_as_they_were_sent", wire=wire(data=replacing(LLMEngineOutput, top_logprobs=None))
)
TestDropsEmptyItems = BrokenPayloads.failing(
    "test_outputs_arrive_as_they_were_sent", wire=wire(data=drops(lambda item: item == LLMEngineOutput()))
)


def eager(real: Any, self: Any, handler: Handler) -> Handler:
    async def items(request: Any, ctx: ServedContext) -> AsyncGenerator[Any, None]:
        async with aclosing(await handler(request, ctx)) as inner:
            async for item in inner:
                yield item

    async def accept(request: Any, ctx: ServedContext) -> AsyncGenerator[Any, None]:
        return items(request, ctx)

    return accept


TestAnswersBeforeItIsAccepted = Broken.failing(
    "test_a_call_does_not_return_before_it_is_accepted",
    "test_a_refusal_keeps_its_type_its_details_and_its_causes",
    "test_a_refused_call_leaves_the_sink_untouched",
    "test_a_foreign_exception_instead_of_an_acceptance_is_an_unknown_refusal",
    "test_after_a_refusal_the_next_call_is_served",
    "test_deferred_callbacks_of_a_refused_call_run_once",
    "test_a_call_cancelled_before_its_acceptance_ends_its_handler",
    "test_a_call_cancelled_before_its_acceptance_leaves_the_sink_untouched",
    handler=eager,
)


def touch(real: Any, self: Any, item: Any) -> None:
    self.touched.set()
    real(item)


async def call_until_touched(real: Any, self: Any, *what: Any) -> Any:
    source = await real(*what)
    await source.owner.touched.wait()
    return source


TestAnswersWithTheFirstItem = Broken.failing(
    "test_a_call_returns_when_it_is_accepted_even_if_no_item_comes",
    wire=wire(
        __init__=own(touched=lambda self: asyncio.Event()),
        data=touch,
        event=touch,
    ),
    call=call_until_touched,
)


def refuse_again(real: Any, self: Any, request: Any) -> Any:
    if self.first is not None:
        raise self.first
    return request


TestRefusesForEver = Broken.failing(
    "test_after_a_refusal_the_next_call_is_served",
    first=None,
    request=refuse_again,
    refused=lambda real, self, error, sink: setattr(self, "first", error),
)


def raise_the_foreign(real: Any, self: Any, error: BaseException, sink: Sink) -> None:
    if isinstance(error, Unknown) and isinstance(error.__cause__, KeyError):
        raise error.__cause__ from None


TestPassesForeignExceptionsOn = Broken.failing(
    "test_a_foreign_exception_instead_of_an_acceptance_is_an_unknown_refusal", refused=raise_the_foreign
)
TestAnswersForAnotherEndpoint = Broken.failing(
    "test_an_endpoint_that_is_not_served_cannot_be_connected_to",
    endpoint=maps(lambda endpoint: COUNT if endpoint.name == "other" else endpoint),
)
TestMixesEndpoints = Broken.failing(
    "test_every_endpoint_and_every_instance_gets_its_own_calls",
    endpoint=maps(
        lambda endpoint: Endpoint(endpoint.name.replace("second", "first"), endpoint.request_type, endpoint.item_type)
    ),
)
TestServesAfterClosing = Broken.failing(
    "test_an_endpoint_that_was_closed_cannot_be_called",
    office=mutant(Proxy, aclose=lambda real, self: self._calls.aclose()),
)


async def close_slowly(real: Any, self: Any) -> None:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    await real()
    if loop.time() - begun >= 0.05:
        await asyncio.sleep(60)


TestWaitsLongForAHandlerThatDoesNotStop = Broken.failing(
    "test_closing_does_not_wait_for_ever_on_a_handler_that_does_not_stop", grip=mutant(Proxy, aclose=close_slowly)
)
TestStopsWhatHasEnded = Broken.failing(
    "test_the_source_of_a_finished_stream_can_be_used_without_effect",
    grip=mutant(
        Proxy,
        __init__=own(ctx=lambda self: self._call._ctx),
        stop=lambda real, self: (real(), self.ctx.stop_generating()),
    ),
)


def release_first(real: Any, self: Any, value: Any) -> None:
    """Send what is held before anything but an error item, and hold item 1."""
    overtakes = isinstance(value, Annotated) and value.is_error()
    held, self.held = ([], self.held) if overtakes else (self.held, [value] if value == Tick(1) else [])
    for item in held:
        self.inner.data(item)
    if value != Tick(1):
        real(value)


TestLetsErrorsOvertakeItems = Broken.failing(
    "test_items_before_an_error_arrive_before_it",
    wire=wire(held=[], data=release_first, event=release_first, closed=release_first),
)
TestRoundsEmbeddings = BrokenPayloads.failing(
    "test_embeddings_arrive_as_they_were_sent",
    wire=wire(
        data=maps(
            lambda item: (
                msgspec.structs.replace(item, embeddings=[list(array("f", one)) for one in item.embeddings])
                if isinstance(item, EmbedOutput)
                else item
            )
        )
    ),
)
TestLosesAFieldOfItemsItDoesNotKnow = BrokenPayloads.failing(
    "test_types_of_an_endpoints_own_arrive_as_they_were_sent", wire=wire(data=replacing(Parcel, sizes={}))
)


def too_large(value: Any) -> bool:
    return isinstance(value, Ask | Tick) and len(value.pad) == 4097


def checked(value: Any) -> Any:
    if too_large(value):
        raise InvalidArgument("more than 4096 bytes")
    return value


def limited(real: Any, self: Any, handler: Handler) -> Handler:
    async def limit(request: Any, ctx: ServedContext) -> AsyncGenerator[Any, None]:
        async def items(inner: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
            async with aclosing(inner):
                async for item in inner:
                    yield checked(item)

        return items(await handler(request, ctx))

    return limit


TestHasALimit = BrokenPayloads.failing(kit={"ITEM_LIMIT": 4096}, request=maps(checked), handler=limited)
TestDropsWhatIsTooLarge = BrokenPayloads.failing(
    "test_an_item_that_is_too_large_ends_its_own_stream_only_with_an_error",
    "test_a_request_that_is_too_large_is_refused_and_other_calls_go_on",
    kit={"ITEM_LIMIT": 4096},
    wire=wire(data=drops(too_large)),
)


class Brittle(Broken):
    """With a connection to break."""

    CAN_BREAK_CONNECTION = True

    async def break_connection(self, planes: Any) -> None:
        for source in planes.client.sources:
            self.cut(source)

    def cut(self, source: Any) -> None:
        source._call.lost()


class TestLosesItsConnection(Brittle):
    pass


TestTakesALostConnectionForAStop = Brittle.failing(
    "test_a_broken_connection_ends_the_handler_without_a_stop",
    kit={"cut": lambda real, self, source: (source._call.stop(), source._call.lost())},
)


def forget(real: Any, self: Any, source: Any) -> None:
    sink, source._sink = source._sink, None
    sink.closed(Disconnected("lost"))


TestKeepsHandlersOfALostConnection = Brittle.failing(
    "test_a_broken_connection_ends_the_handler_without_a_stop",
    # The check breaks the connection, and its context is no call's.
    "test_a_broken_connection_ends_each_call_in_its_own_context",
    kit={"cut": forget},
)
TestCallsALostConnectionSomethingElse = Brittle.failing(
    "test_a_broken_connection_ends_every_stream",
    wire=wire(closed=maps(lambda error: error and StreamIncomplete("the stream ended"))),
)
TestTellsOfALostConnectionInTheContextOfItsReader = Brittle.failing(
    "test_a_broken_connection_ends_each_call_in_its_own_context",
    wire=wire(
        closed=lambda real, self, error: Context().run(real, error) if isinstance(error, Disconnected) else real(error)
    ),
)
TestDoesNotConnectAgain = Brittle.failing(
    "test_after_a_broken_connection_the_next_call_connects_anew",
    kit={"break_connection": then(lambda self, planes: planes.client._served.clear())},
)


def lose_unnoticed(real: Any, self: Any, item: Any) -> None:
    if self.owner.losing:
        self.owner.losing = False
    else:
        real(item)


def lose_and_notice(real: Any, self: Any, item: Any) -> None:
    """Lose the next item when told to, and notice: what the wire carries is numbered."""
    if self.owner.losing:
        self.owner.losing, self.over = False, True
        self.inner.closed(StreamIncomplete("an item is missing"))
        self.owner.sources[-1].stop()
    elif not self.over:
        real(item)


def go_on_after_a_loss(real: Any, self: Any, item: Any) -> None:
    if self.owner.losing and not self.over:
        self.over = True
        self.inner.closed(StreamIncomplete("an item is missing"))
    else:
        real(item)


def unless_over(real: Any, self: Any, value: Any) -> None:
    if not self.over:
        real(value)


class Lossy(Broken):
    """With items that can be lost on the way."""

    CAN_LOSE_AN_ITEM = True
    PART = mutant(Meddler, wire=wire(over=False, data=lose_and_notice, event=unless_over, closed=unless_over))

    async def lose_an_item(self, planes: Any) -> None:
        planes.client.losing = True


class TestNoticesALoss(Lossy):
    pass


TestDoesNotNoticeALoss = Lossy.failing("test_an_item_lost_on_the_way_is_noticed", wire=wire(data=lose_unnoticed))
TestGoesOnAfterALoss = Lossy.failing(
    "test_an_item_lost_on_the_way_is_noticed",
    wire=wire(over=False, data=go_on_after_a_loss, event=unless_over, closed=unless_over),
)
