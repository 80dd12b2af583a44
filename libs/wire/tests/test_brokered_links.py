"""Links over a broker: how much may be under way, and what is known of each other."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from itertools import count
from typing import Any

import msgspec
import pytest
from dynamo_core import DynamoError, Endpoint, EngineContext, LLMEngineOutput, PluginConfig, Served, ServedContext
from dynamo_core.contracts.transports import serving
from dynamo_core.errors import (
    CannotConnect,
    Disconnected,
    ResponseTimeout,
    StreamIncomplete,
    WorkerOverloaded,
    chain_has,
)
from dynamo_core.protocol import Instance
from dynamo_core.protocol.output import merge_outputs
from dynamo_plugin_discovery_memory.discovery import MemoryDiscovery
from dynamo_telemetry import Metrics
from dynamo_testing.transport.handlers import close_calls_that_do_not_end
from dynamo_wire import calls, liveness
from dynamo_wire.brokered.addresses import Addresses, is_link, word
from dynamo_wire.brokered.broker import OutboundMessage
from dynamo_wire.brokered.peer_link import CREDIT
from dynamo_wire.brokered.wire_format import (
    ARRIVED,
    PROBED,
    Checksums,
    Fragment,
    LinkError,
    answer_fragment,
    arrived_fragment,
    read_answer,
    read_fragment,
)
from dynamo_wire.messages import Ack, Row, Rows, encode
from hypothesis import given
from hypothesis import strategies as st

WAIT = 10.0
ECHO = Endpoint("echo", bytes, bytes)
TOKENS = Endpoint("tokens", int, LLMEngineOutput, merge_outputs)


async def echo(request: bytes, ctx: ServedContext) -> AsyncGenerator[bytes, None]:
    async def items() -> AsyncGenerator[bytes, None]:
        yield request

    return items()


def at(served: Served, instance_id: int = 7) -> Instance:
    return Instance(instance_id=instance_id, address=served.address)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT):
        while not condition():  # noqa: ASYNC110 - nothing tells when it holds
            await asyncio.sleep(0.005)


def fragment(message: OutboundMessage) -> Fragment:
    return read_fragment(message.data)


# How much is under way.


@pytest.mark.parametrize("outcome", [OSError("refused"), None], ids=["badly", "well"])
async def test_closing_ends_an_attempt_to_reconnect_that_ends_in_the_same_moment(
    office: Any, make_transport: Any, outcome: Exception | None
) -> None:
    transport = await make_transport()
    knocking = asyncio.Event()

    async def door() -> None:
        knocking.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            # As `asyncio.wait_for` up to Python 3.11: the cancelling is forgotten.
            if outcome is not None:
                raise outcome from None

    office.door = door
    transport.break_connection()
    await asyncio.wait_for(knocking.wait(), WAIT)

    await asyncio.wait_for(transport.aclose(), WAIT)

    assert office.closed == 2, "the connection that broke and the new one are both closed"


async def test_a_large_message_is_no_faster_than_its_reader(office: Any, make_transport: Any, recorder: Any) -> None:
    server, client = await make_transport(), await make_transport()
    instance, sink = at(await server.serve(7, ECHO, echo)), recorder()
    office.delivers.clear()

    async with asyncio.TaskGroup() as group:
        group.create_task(client.call(instance, ECHO, bytes(3 * CREDIT), EngineContext("r"), sink))
        await until(lambda: sum(len(message.data) for message in office.kept) >= CREDIT)
        for _ in range(100):
            await asyncio.sleep(0)
        in_flight = sum(len(message.data) for message in office.kept)
        link = next(iter(client._peers._links.values()))
        blocked = link.blocked
        office.deliver_kept()

    assert in_flight < CREDIT + 2 * 64 * 1024
    assert blocked, "who has more to send should wait"
    assert await sink.end() is None
    assert sink.items == [bytes(3 * CREDIT)]
    assert not link.blocked


async def test_two_large_messages_that_meet_do_not_stop_each_other(
    office: Any, make_transport: Any, recorder: Any
) -> None:
    server, client = await make_transport(), await make_transport()
    instance, sinks = at(await server.serve(7, ECHO, echo)), [recorder() for _ in range(6)]

    async with asyncio.TaskGroup() as group:
        for number, sink in enumerate(sinks):
            payload = bytes([number]) * (3 * CREDIT)
            group.create_task(client.call(instance, ECHO, payload, EngineContext("r"), sink))

    for number, sink in enumerate(sinks):
        assert await sink.end() is None
        assert sink.items == [bytes([number]) * (3 * CREDIT)]


async def test_a_count_that_is_lost_is_asked_for(office: Any, make_transport: Any, recorder: Any) -> None:
    server, client = await make_transport(heartbeat=0.05), await make_transport(heartbeat=0.05)
    instance, sink = at(await server.serve(7, ECHO, echo)), recorder()
    lost: list[OutboundMessage] = []

    def loses(message: OutboundMessage) -> bool:
        if fragment(message).number == ARRIVED and len(lost) < 30:
            lost.append(message)
            return True
        return False

    office.loses = loses
    await client.call(instance, ECHO, bytes(3 * CREDIT), EngineContext("r"), sink)

    assert lost
    assert await sink.end() is None


async def test_a_worker_that_dies_in_the_middle_of_a_large_request_is_noticed(
    office: Any, make_transport: Any, recorder: Any
) -> None:
    server, client = await make_transport(), await make_transport(heartbeat=0.05, accept_timeout=60)
    instance = at(await server.serve(7, ECHO, echo))
    office.loses = lambda message: message.address.startswith("test.cl.") and fragment(message).number == ARRIVED

    async with asyncio.TaskGroup() as group:
        calling = group.create_task(
            _refusal(client.call(instance, ECHO, bytes(3 * CREDIT), EngineContext("r"), recorder()))
        )
        await until(lambda: any(link.blocked for link in client._peers._links.values()))
        office.listenings[instance.address["office"]].clear()

    assert isinstance(calling.result(), CannotConnect)
    assert "no process listens" in str(calling.result())


async def _refusal(call: Coroutine[Any, Any, Any]) -> DynamoError:
    async with asyncio.timeout(WAIT):
        try:
            await call
        except DynamoError as error:
            return error
    pytest.fail("the call was accepted")


async def test_calls_that_do_not_end_are_warned_of_once_for_all_of_a_link(
    make_transport: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calls, "CLOSE_BOUND", 0.1)
    monkeypatch.setattr(serving, "STOP_GRACE", 0.5)

    await close_calls_that_do_not_end(await make_transport(), await make_transport())

    assert len([record for record in caplog.records if "abandoned" in record.getMessage()]) == 1


async def test_an_end_that_counts_more_than_was_sent_is_given_up(
    office: Any, make_transport: Any, recorder: Any
) -> None:
    server, client = await make_transport(), await make_transport()
    instance, sink = at(await server.serve(7, ECHO, echo)), recorder()
    await client.call(instance, ECHO, b"", EngineContext("r"), sink)
    await sink.end()
    link = next(iter(client._peers._links.values()))

    link.receive(arrived_fragment(2**40), "")

    assert link.closed


async def test_a_caller_that_takes_more_rows_than_were_sent_is_given_up(make_transport: Any, recorder: Any) -> None:
    server, client = await make_transport(), await make_transport()
    instance, sink = at(await server.serve(7, ECHO, echo)), recorder()
    await client.call(instance, ECHO, b"", EngineContext("r"), sink)
    await sink.end()

    next(iter(client._peers._links.values())).send(Ack(5))

    await until(lambda: not server._registry.acceptors[7].links)


async def test_messages_before_a_close_are_sent_under_backpressure(
    office: Any, make_transport: Any, recorder: Any
) -> None:
    server, client = await make_transport(), await make_transport()
    gone = asyncio.Event()

    async def wait(request: bytes, ctx: ServedContext) -> AsyncGenerator[bytes, None]:
        async def items() -> AsyncGenerator[bytes, None]:
            try:
                yield b"begun"
                await asyncio.Event().wait()
            finally:
                gone.set()

        return items()

    instance, sink = at(await server.serve(7, ECHO, wait)), recorder()
    await client.call(instance, ECHO, b"", EngineContext("r"), sink)
    await sink.until(lambda: sink.items)
    link = next(iter(client._peers._links.values()))
    office.delivers.clear()
    link.send(bytes(2 * CREDIT))
    await until(lambda: link.blocked)

    link.close(Disconnected("enough"))
    await until(lambda: sum(len(message.data) for message in office.kept) > 2 * CREDIT)
    office.deliver_kept()

    async with asyncio.timeout(WAIT):
        await gone.wait()
    assert not server._registry.acceptors[7].links


# Rows.


async def test_a_slow_caller_delays_its_ack_and_rows_are_batched(
    make_transport: Any, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = await make_transport(), await make_transport()
    ticks, begin, sink = count(), asyncio.Event(), recorder()
    monkeypatch.setattr(calls, "monotonic", lambda: 1000.0 * next(ticks))
    monkeypatch.setattr(calls, "MAX_REST", 3600.0)

    async def engine(request: int, ctx: ServedContext) -> AsyncGenerator[LLMEngineOutput, None]:
        async def items() -> AsyncGenerator[LLMEngineOutput, None]:
            yield LLMEngineOutput([0])
            await begin.wait()
            for token in range(1, 6):
                yield LLMEngineOutput([token])
                for _ in range(20):
                    await asyncio.sleep(0)

        return items()

    instance = at(await server.serve(7, TOKENS, engine))
    await client.call(instance, TOKENS, 0, EngineContext("r"), sink)
    await sink.until(lambda: sink.items)
    begin.set()

    # Nothing was asked for, so the rows came together, with the end that never waits.
    assert await sink.end() is None
    assert [item.token_ids for item in sink.items] == [[0], [1, 2, 3, 4, 5]]


async def test_an_engine_that_never_waits_is_sent_in_few_messages(
    office: Any, make_transport: Any, recorder: Any
) -> None:
    server, client = await make_transport(), await make_transport()
    sink = recorder()

    async def engine(request: int, ctx: ServedContext) -> AsyncGenerator[LLMEngineOutput, None]:
        async def items() -> AsyncGenerator[LLMEngineOutput, None]:
            for token in range(1000):
                yield LLMEngineOutput([token])

        return items()

    instance = at(await server.serve(7, TOKENS, engine))
    await client.call(instance, TOKENS, 0, EngineContext("r"), sink)

    assert await sink.end() is None
    assert [token for item in sink.items for token in item.token_ids] == list(range(1000))
    assert len(office.messages) < 100


async def test_a_row_that_is_missing_ends_its_stream_only(make_transport: Any, recorder: Any) -> None:
    server, client = await make_transport(), await make_transport()
    left = [asyncio.Event(), asyncio.Event()]

    async def engine(request: int, ctx: ServedContext) -> AsyncGenerator[LLMEngineOutput, None]:
        async def items() -> AsyncGenerator[LLMEngineOutput, None]:
            try:
                yield LLMEngineOutput([0])
                await asyncio.Event().wait()
            finally:
                left[request].set()

        return items()

    instance, sinks = at(await server.serve(7, TOKENS, engine)), [recorder(), recorder()]
    for number, sink in enumerate(sinks):
        await client.call(instance, TOKENS, number, EngineContext("r"), sink)
        await sink.until(lambda sink=sink: sink.items)
    link = next(iter(client._peers._links.values()))

    link.calls.on_rows(Rows([Row(1, 2, [7]), Row(2, 1, [7])]))

    assert isinstance(await sinks[0].end(), StreamIncomplete)
    assert [item.token_ids for item in sinks[0].items] == [[0]]
    assert [item.token_ids for item in sinks[1].items] == [[0], [7]]
    async with asyncio.timeout(WAIT):
        await left[0].wait()
    assert not left[1].is_set()


# Bounds.


async def hold(request: bytes, ctx: ServedContext) -> AsyncGenerator[bytes, None]:
    """Hold its call until it is stopped."""

    async def items() -> AsyncGenerator[bytes, None]:
        yield b"begun"
        await asyncio.Event().wait()

    return items()


async def test_a_worker_limits_its_callers(make_transport: Any, recorder: Any) -> None:
    server, first, second = await make_transport(max_callers=1), await make_transport(), await make_transport()
    instance, sink = at(await server.serve(7, ECHO, hold)), recorder()
    await first.call(instance, ECHO, b"", EngineContext("r"), sink)

    with pytest.raises(DynamoError, match="no more are let in"):
        await second.call(instance, ECHO, b"", EngineContext("s"), recorder())

    assert not sink.ends


async def test_no_more_calls_of_a_process_run_than_a_worker_accepts(make_transport: Any, recorder: Any) -> None:
    server, client = await make_transport(max_streams=1), await make_transport()
    instance, sink = at(await server.serve(7, ECHO, hold)), recorder()
    source = await client.call(instance, ECHO, b"", EngineContext("r"), sink)

    with pytest.raises(WorkerOverloaded, match="no more are accepted"):
        await client.call(instance, ECHO, b"", EngineContext("s"), recorder())

    await source.aclose()
    await client.call(instance, ECHO, b"", EngineContext("t"), recorder())


async def test_a_slow_subscribers_lost_events_are_counted_and_show_as_a_gap(
    make_transport: Any,
) -> None:
    metrics = Metrics()
    sender, receiver = await make_transport(), await make_transport(metrics, event_backlog=5)
    directory = MemoryDiscovery(PluginConfig(), Metrics())
    publisher = await sender.events().publisher("loads", await directory.lease())
    async with aclosing(receiver.events().subscribe("loads", directory)) as events:
        first = asyncio.ensure_future(anext(events))
        await until(lambda: publisher.send(b"begin") and first.done())
        before = (await first)[1]
        for _ in range(100):
            publisher.send(b"x")
        for _ in range(100):
            await asyncio.sleep(0)
        numbers = [before]
        async with asyncio.timeout(WAIT):
            while numbers[-1] < before + 100:
                publisher.send(b"later")
                numbers.append((await anext(events))[1])

    assert numbers == sorted(set(numbers))
    assert len(numbers) < 50, "more waited than may"
    assert re.search(rb"dynamo_event_plane_dropped_total\{subject=\"loads\"\} [1-9]", await metrics.render())
    await directory.aclose()


# What is known of each other.


async def test_no_lost_message_corrupts_a_stream(office: Any, make_transport: Any, recorder: Any) -> None:
    patience = {"heartbeat": 0.05, "accept_timeout": 0.3}
    server, client = await make_transport(**patience), await make_transport(**patience)
    instance = at(await server.serve(7, ECHO, echo))
    for nth in range(8):
        first = len(office.messages) + nth
        office.loses = lambda message, first=first: len(office.messages) == first + 1
        sink = recorder()
        try:
            await client.call(instance, ECHO, b"x" * 200_000, EngineContext("r"), sink)
        except DynamoError:
            assert sink.items == sink.ends == []
            continue
        error = await sink.end()
        assert (error is None) == any(event.is_complete_final() for event in sink.events)
        assert error is not None or sink.items == [b"x" * 200_000]


async def test_a_worker_rejects_a_message_on_an_unknown_broker_link(office: Any, make_transport: Any) -> None:
    server = await make_transport()
    instance = at(await server.serve(7, ECHO, echo))
    link = f"{'0' * 24}.1"

    office.take(OutboundMessage(instance.address["office"], link, encode((5, False, b"")), ""))
    await until(lambda: any(message.address == f"test.cl.{'0' * 24}" for message in office.messages))

    answer = next(message for message in office.messages if message.address.startswith("test.cl."))
    assert (answer.link, fragment(answer).number) == (link, -1)
    assert not server._registry.acceptors[7].links


@pytest.mark.parametrize("link", ["", "x", "*.1", f"{'0' * 24}.>", f"{'g' * 24}.1", f"{'0' * 24}.1 2"])
async def test_an_invalid_link_name_is_never_answered(office: Any, make_transport: Any, link: str) -> None:
    server = await make_transport()
    instance = at(await server.serve(7, ECHO, echo))
    before = len(office.messages)

    office.take(OutboundMessage(instance.address["office"], link, encode((5, False, b"")), ""))
    office.take(OutboundMessage(instance.address["office"], link, encode((0, False, b"\x90")), ""))
    for _ in range(10):
        await asyncio.sleep(0)

    assert len(office.messages) == before + 2
    assert not server._registry.acceptors[7].links


async def test_a_fragment_that_is_missing_ends_the_streams_of_its_link_only(
    office: Any, make_transport: Any, recorder: Any
) -> None:
    one, other, client = await make_transport(), await make_transport(), await make_transport()
    steps = asyncio.Event()

    async def slow(request: bytes, ctx: ServedContext) -> AsyncGenerator[bytes, None]:
        async def items() -> AsyncGenerator[bytes, None]:
            yield b"begun"
            await steps.wait()
            yield b"more"

        return items()

    broken, whole = recorder(), recorder()
    await client.call(at(await one.serve(7, ECHO, slow)), ECHO, b"", EngineContext("r"), broken)
    await client.call(at(await other.serve(8, ECHO, slow), 8), ECHO, b"", EngineContext("s"), whole)
    for sink in (broken, whole):
        await sink.until(lambda sink=sink: sink.items)

    name = client._peers._links[one._registry.acceptors[7].address].name
    lost: list[OutboundMessage] = []

    def loses(message: OutboundMessage) -> bool:
        if not lost and message.link == name and message.address.startswith("test.cl."):
            lost.append(message)
        return bool(lost) and lost[0] is message

    office.loses = loses
    steps.set()

    error = await broken.end()
    assert isinstance(error, StreamIncomplete), error
    assert await whole.end() is None


# Addresses and fragments.


@given(st.text(), st.text())
def test_different_texts_are_different_words_of_an_address(one: str, other: str) -> None:
    assert (word(one) == word(other)) == (one == other)
    assert word(one)
    assert not set(word(one)) & set(". :*>\r\n\t")


@pytest.mark.parametrize("separator", [".", ":"])
@given(st.integers(0, 2**63 - 1), st.binary(min_size=12, max_size=12), st.integers(0, 10**17))
def test_a_worker_knows_its_own_addresses_and_links(separator: str, instance_id: int, run: bytes, number: int) -> None:
    addresses = Addresses(separator.join(("a", "b")), separator)
    worker = addresses.worker(instance_id, run)

    assert addresses.is_worker(worker)
    assert not addresses.is_worker(worker + "0")
    assert not addresses.is_worker(worker + "\n")
    assert is_link(f"{run.hex()}.{number}")
    assert addresses.caller(f"{run.hex()}.{number}") == separator.join(("a", "b", "cl", run.hex()))


@given(st.binary(max_size=200))
def test_bytes_that_are_no_fragment_are_refused_and_nothing_else(data: bytes) -> None:
    try:
        found = read_fragment(data)
    except LinkError:
        return
    assert found.number >= ARRIVED


@given(st.integers(0, 2**63 - 1), st.booleans(), st.binary(max_size=100))
def test_fragments_come_back_as_they_went(number: int, more: bool, body: bytes) -> None:
    found = read_fragment(encode((number, more, body)))

    assert (found.number, found.more, bytes(found.body)) == (number, more, body)
    assert msgspec.msgpack.decode(arrived_fragment(number))[0] == ARRIVED


# Who lives.


async def test_a_worker_without_probes_has_the_plain_silence_limit(
    office: Any, make_transport: Any, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "WITHOUT_PROBES", 0.4)
    server, client = await make_transport(), await make_transport(heartbeat=0.1)
    served, sink = await server.serve(7, ECHO, endless), recorder()
    instance = Instance(instance_id=7, address=served.address, lease_ttl=60.0)
    await client.call(instance, ECHO, b"", EngineContext("r"), sink)
    await sink.until(lambda: sink.items)

    office.loses = lambda message: message.address.startswith("test.cl.")

    assert chain_has(await sink.end() or Disconnected(), ResponseTimeout)


@pytest.mark.parametrize("busy", [0.0, 1.5])
async def test_a_busy_report_keeps_a_worker_but_answers_alone_do_not_keep_a_link(
    office: Any, make_transport: Any, recorder: Any, caplog: pytest.LogCaptureFixture, busy: float
) -> None:
    server, client = await make_transport(), await make_transport(heartbeat=0.1, silence=0.4)
    instance, sink = at(await server.serve(7, ECHO, endless)), recorder()
    await client.call(instance, ECHO, b"", EngineContext("r"), sink)
    await sink.until(lambda: sink.items)
    link = next(iter(client._peers._links.values()))
    probed: list[OutboundMessage] = []

    def loses(message: OutboundMessage) -> bool:
        if message.address == instance.address["office"].replace(".rq.", ".pb."):
            probed.append(message)
            link.receive(answer_fragment(busy), "")
        return message.address.startswith("test.cl.")

    office.loses = loses
    await until(lambda: len(probed) >= 10 if busy else sink.ends)

    assert probed
    assert {message.link for message in probed} == {link.name}
    assert bool(sink.ends) is not bool(busy)
    assert [record.getMessage() for record in caplog.records if "busy" in record.getMessage()] == (
        [f"the event loop of {link.peer} is busy, for 1.5 s so far: 1 calls wait"] if busy else []
    )


@given(st.floats(0, 1e6))
def test_a_probe_answer_survives_encoding(busy: float) -> None:
    answer = read_fragment(answer_fragment(busy))

    assert answer.number == PROBED
    assert read_answer(answer.body) == busy


@pytest.mark.parametrize("body", [b"", b"\xcb\xbf\xf0\x00\x00\x00\x00\x00\x00", b"\xa1x"])
def test_a_malformed_probe_answer_raises_a_link_error(body: bytes) -> None:
    with pytest.raises(LinkError, match="answer to a probe"):
        read_answer(memoryview(body))


async def endless(request: bytes, ctx: ServedContext) -> AsyncGenerator[bytes, None]:
    async def items() -> AsyncGenerator[bytes, None]:
        yield b"begun"
        await ctx.stopped()

    return items()


# What is changed on the way.


@given(
    st.text(max_size=20), st.integers(0, 2**62), st.booleans(), st.binary(max_size=200), st.integers(0), st.integers(1)
)
def test_no_bit_of_a_fragment_can_change_without_its_checksum_telling(
    link: str, number: int, more: bool, body: bytes, at: int, bit: int
) -> None:
    checksums = Checksums(link, "there")
    data = bytearray(encode((number, more, body, checksums.of(number, more, body))))
    data[at % len(data)] ^= 1 << bit % 8

    try:
        fragment = read_fragment(bytes(data))
    except LinkError:
        return

    assert fragment.check != checksums.of(fragment.number, fragment.more, fragment.body)


def test_a_checksum_belongs_to_one_link_one_direction_and_one_fragment() -> None:
    mine = Checksums("a.1", "there").of(1, False, b"body")

    others = [
        Checksums("a.2", "there").of(1, False, b"body"),
        Checksums("a.1", "here").of(1, False, b"body"),
        Checksums("a.1", "there").of(2, False, b"body"),
        Checksums("a.1", "there").of(1, True, b"body"),
        Checksums("a.1", "there").of(1, False, b"bodi"),
    ]

    assert mine not in others


@pytest.mark.parametrize("end", ["worker", "caller"])
@pytest.mark.parametrize("harm", ["changed", "of another link", "without its checksum"])
async def test_a_damaged_fragment_ends_its_link_and_is_counted(
    office: Any, make_transport: Any, recorder: Any, end: str, harm: str
) -> None:
    metrics = Metrics()
    damaged = metrics.counter("dynamo_office_damaged_messages_total", "").labels()
    server = await make_transport(metrics if end == "worker" else None)
    client = await make_transport(metrics if end == "caller" else None)
    instance, first, second = at(await server.serve(7, ECHO, endless)), recorder(), recorder()
    await client.call(instance, ECHO, b"", EngineContext("r"), first)
    await first.until(lambda: first.items)
    there = ".rq." if end == "worker" else ".cl."

    def spoilt(message: OutboundMessage) -> OutboundMessage:
        fragment = read_fragment(message.data)
        if there not in message.address or fragment.number < 1:
            return message
        if harm == "changed":
            return message._replace(data=message.data[:-1] + bytes([message.data[-1] ^ 1]))
        if harm == "without its checksum":
            return message._replace(data=encode((fragment.number, fragment.more, fragment.body)))
        other = Checksums("another.1", message.address).of(fragment.number, fragment.more, fragment.body)
        return message._replace(data=encode((fragment.number, fragment.more, fragment.body, other)))

    office.spoils = spoilt
    with pytest.raises(Disconnected):
        await client.call(instance, ECHO, b"", EngineContext("s"), second)

    assert isinstance(await first.end(), Disconnected)
    await until(lambda: damaged.value)


@pytest.mark.parametrize("without", ["server", "client"])
async def test_an_end_that_sends_no_checksums_is_understood(make_transport: Any, recorder: Any, without: str) -> None:
    server, client = [await make_transport(checksum=end != without) for end in ("server", "client")]
    instance, sink = at(await server.serve(7, ECHO, echo)), recorder()

    await client.call(instance, ECHO, bytes(3_000_000), EngineContext("r"), sink)

    assert await sink.end() is None
    assert sink.items == [bytes(3_000_000)]
