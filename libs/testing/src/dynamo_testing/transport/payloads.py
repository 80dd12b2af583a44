"""Checks that payloads arrive unchanged: requests, outputs, custom types, small and large."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, cast

import msgspec
from dynamo_core.contracts.transports.call import EMBED, GENERATE, Endpoint, ServedContext
from dynamo_core.errors import DynamoError, InvalidArgument, StreamIncomplete, Unknown
from dynamo_core.protocol.output import LLMEngineOutput, merge_outputs
from dynamo_core.protocol.request import EmbedOutput, EmbedRequest, PreprocessedRequest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dynamo_testing import strategies
from dynamo_testing.optional_packages import pytest
from dynamo_testing.transport.harness import COUNT, Ask, Stage, Tick, TransportHarness
from dynamo_testing.waiting import turns

#: The pair is kept for all examples of a check, which is what a long-lived connection has to bear, too.
examples = settings(
    max_examples=30,
    deadline=None,
    database=None,
    # The verdict on a plugin should not depend on the day.
    derandomize=True,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors, HealthCheck.too_slow],
)

MEBIBYTE = 1024 * 1024


class Parcel(msgspec.Struct):
    """A type that only its endpoint knows."""

    name: str
    blob: bytes = b""
    sizes: dict[str, int] = {}
    inner: list[Parcel] = []


parcels: st.SearchStrategy[Parcel] = st.builds(
    Parcel,
    name=strategies.texts,
    blob=st.binary(max_size=40),
    sizes=st.dictionaries(strategies.texts, strategies.integers, max_size=3),
    inner=st.lists(st.builds(Parcel, name=strategies.texts), max_size=2),
)


class PayloadChecks(TransportHarness):
    """Checks that nothing is lost or changed on the way."""

    @examples
    @given(request=strategies.requests)
    async def test_a_request_arrives_as_it_was_sent(self, stage: Stage, request: PreprocessedRequest) -> None:
        await self._serve_once(stage, GENERATE, [])

        await stage.collect(request, endpoint=GENERATE)

        assert stage.visits[-1].request == request

    @examples
    @given(outputs=st.lists(strategies.outputs, max_size=6))
    async def test_outputs_arrive_as_they_were_sent(self, stage: Stage, outputs: list[LLMEngineOutput]) -> None:
        # What waits may be merged on the way; merging the rest must give the same.
        await self._serve_once(stage, GENERATE, outputs)

        sink = await stage.collect(PreprocessedRequest(token_ids=[]), endpoint=GENERATE)

        assert merge_outputs(sink.items) == merge_outputs(outputs)

    @examples
    @given(sent=st.lists(parcels, max_size=4))
    async def test_types_of_an_endpoints_own_arrive_as_they_were_sent(self, stage: Stage, sent: list[Parcel]) -> None:
        endpoint = Endpoint("parcels", list[Parcel], Parcel)
        await self._serve_once(stage, endpoint, sent)

        sink = await stage.collect(sent, endpoint=endpoint)

        assert stage.visits[-1].request == sent
        assert sink.items == sent

    async def test_embeddings_arrive_as_they_were_sent(self, stage: Stage) -> None:
        output = EmbedOutput(embeddings=[[0.1, -2.5e-8, 3.0], []], prompt_tokens=7)
        await self._serve_once(stage, EMBED, [output])
        request = EmbedRequest(model="größe", token_ids=[[1, 2], []], dimensions=3)

        sink = await stage.collect(request, endpoint=EMBED)

        assert stage.visits[-1].request == request
        assert sink.items == [output]

    async def test_a_request_and_an_item_of_a_mebibyte_arrive(self, stage: Stage) -> None:
        pad = bytes(range(256)) * (MEBIBYTE // 256)

        async def echo(ask: Ask, ctx: ServedContext) -> AsyncGenerator[Tick, None]:
            yield Tick(0)
            yield Tick(1, pad=ask.pad)
            yield Tick(2)

        await stage.serve(echo)

        sink = await stage.collect(Ask(pad=pad))

        assert [(item.number, len(item.pad)) for item in sink.items] == [(0, 0), (1, MEBIBYTE), (2, 0)]
        assert sink.items[1].pad == pad

    async def test_an_item_that_is_too_large_ends_its_own_stream_only_with_an_error(self, stage: Stage) -> None:
        limit = self._limit()

        async def body(ask: Ask, ctx: ServedContext) -> AsyncGenerator[Tick, None]:
            yield Tick(0)
            if ask.stream:
                yield Tick(1, pad=bytes(limit + 1))
            else:
                await ctx.stopped()
            yield Tick(2)

        other = await stage.running(body)

        sink = await stage.collect(Ask(stream=1))
        other.ctx.stop_generating()
        await other.sink.end()

        assert sink.error() is not None, "the stream ended well, without one of its items"
        assert sink.items[0] == Tick(0)
        assert other.sink.error() is None, "another stream suffered"
        assert [item.number for item in other.sink.items] == [0, 2]

    async def test_a_request_that_is_too_large_is_refused_and_other_calls_go_on(self, stage: Stage) -> None:
        limit = self._limit()
        other = await stage.running()

        with pytest.raises(DynamoError):
            await stage.call(Ask(limit=1, pad=bytes(limit + 1)))
        sink = await stage.collect(Ask(limit=3))
        other.ctx.stop_generating()
        await other.sink.end()

        assert len(sink.items) == 3
        assert other.sink.error() is None, "another stream suffered"

    async def test_an_item_that_cannot_be_encoded_ends_its_own_stream_only_with_an_error(self, stage: Stage) -> None:
        self._needs_encoding(stage)

        async def body(ask: Ask, ctx: ServedContext) -> AsyncGenerator[Tick, None]:
            yield Tick(0)
            if ask.stream:
                # The first item leaves in a turn of its own.
                await turns()
                yield Tick(1, pad=cast(bytes, object()))
            await ctx.stopped()

        other = await stage.running(body)

        sink = await stage.collect(Ask(stream=1))
        other.ctx.stop_generating()
        await other.sink.end()

        assert isinstance(sink.error(), Unknown)
        assert sink.items == [Tick(0)]
        assert other.sink.error() is None, "another stream suffered"

    async def test_an_item_of_another_type_than_the_caller_expects_makes_the_stream_incomplete(
        self, stage: Stage
    ) -> None:
        self._needs_encoding(stage)
        await stage.serve()

        call = await stage.call(endpoint=Endpoint(COUNT.name, Ask, str))
        await call.sink.end()

        assert isinstance(call.sink.error(), StreamIncomplete)
        assert call.sink.items == []
        await stage.happens(stage.visits[0].left, "the end of the handler")

    async def test_a_request_of_the_wrong_type_is_refused(self, stage: Stage) -> None:
        self._needs_encoding(stage)
        await stage.serve()

        for request in ("three", object()):
            with pytest.raises(InvalidArgument):
                await stage.call(request)

        assert stage.visits == [], "the handler was called"

    def _needs_encoding(self, stage: Stage) -> None:
        if not stage.planes.server.CROSS_PROCESS:
            pytest.skip("CROSS_PROCESS is False: items are not encoded")

    def _limit(self) -> int:
        if self.ITEM_LIMIT is None:
            pytest.skip("ITEM_LIMIT is None: there is no limit")
        return self.ITEM_LIMIT

    async def _serve_once(self, stage: Stage, endpoint: Endpoint, items: list[Any]) -> None:
        """Serve `items` at an endpoint, in place of what an earlier example served there."""
        earlier = next((served for (_, name), served in stage.served.items() if name == endpoint.name), None)
        if earlier is not None:
            await earlier.aclose()

        async def body(request: Any, ctx: ServedContext) -> AsyncGenerator[Any, None]:
            for item in items:
                yield item

        await stage.serve(body, endpoint=endpoint)
