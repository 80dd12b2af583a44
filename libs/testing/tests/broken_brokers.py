"""Transports over a broker that break one promise each, and what of the kit must find it.

Not collected with the other tests: `test_kits_on_broken_parts` runs this file and compares. A part runs only the
checks that it must fail: each of them starts servers, and all of them pass for the part without a fault.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from dynamo_core.errors import CannotConnect, EngineShutdown, Unavailable
from dynamo_plugin_transport_redis.broker import _RedisSession
from dynamo_plugin_transport_redis.transport import RedisTransport
from dynamo_testing.brokered import absence, bench, closing, events, outages
from dynamo_testing.brokered_kit import BrokeredTransportKit
from dynamo_testing.transport import handlers
from dynamo_testing.transport.harness import Recorder
from dynamo_wire import Action, Calls, Liveness, ServerStreams
from dynamo_wire.brokered import Addresses, Broker
from dynamo_wire.brokered import events as plane
from dynamo_wire.brokered.calling import CallerLink, Peers
from dynamo_wire.brokered.peer_link import Link
from dynamo_wire.brokered.serving import Acceptor, WorkerLink
from dynamo_wire.brokered.wire_format import bundle
from dynamo_wire.calls import Call

from libs.testing.tests.planted import Planted

PLUGINS = Path(__file__).parents[3] / "plugins"


def load(name: str, path: Path) -> ModuleType:
    """Return the conftest of other tests."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


directory = load("plugins_conftest", PLUGINS / "conftest.py").directory

redis_bench = load("redis_bench", PLUGINS / "transports/redis/tests/conftest.py")

redis_server = redis_bench.redis_server

bench_fixture = redis_bench.bench


class Redis:
    """The transport as it is."""

    def fault(self, patch: pytest.MonkeyPatch) -> None:
        """Exchange nothing."""


class Broken(Planted, BrokeredTransportKit):
    """The kit over Redis, with a part exchanged."""

    WAIT: ClassVar[float] = 10.0
    PATIENCE = (2.0, 10.0)
    PART = Redis

    @pytest.fixture(autouse=True)
    def broken(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        # The processes of workers import this file.
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
        if not self.FAILS:
            return
        if request.node.originalname not in self.FAILS:
            pytest.skip("this part does not break it")
        for module in (absence, bench, closing, events, outages, handlers):
            monkeypatch.setattr(module, "WAIT", self.PATIENCE[0])
        monkeypatch.setattr(Recorder.__init__, "__defaults__", self.PATIENCE[:1])
        self.PART().fault(monkeypatch)

    @pytest.fixture
    def bench(self, bench_fixture: Any) -> Any:
        return bench_fixture


class TestWithoutAFault(Broken):
    pass


def each_message_alone(real: Any, self: Any, patch: pytest.MonkeyPatch) -> None:
    pack: Any = ServerStreams._pack

    def pack_each(self: ServerStreams, rows: list[Any], out: list[bytes], limit: int) -> None:
        for row in rows:
            pack(self, [row], out, limit)

    def flush(self: Link) -> None:
        self._scheduled = False
        out, self._out = self._out, []
        self.collect(out)
        for message in out:
            self._publish(bundle([message]))

    patch.setattr(ServerStreams, "_pack", pack_each)
    patch.setattr(Link, "_flush", flush)


TestSendsEachMessageAlone = Broken.failing(
    "test_far_fewer_messages_than_tokens_reach_the_server",
    "test_the_rows_of_all_streams_in_one_turn_leave_in_one_message",
    "test_all_output_of_a_worker_in_one_turn_leaves_in_one_message",
    fault=each_message_alone,
)


def one_part_only(real: Any, self: Any, patch: pytest.MonkeyPatch) -> None:
    publish: Any = Link._publish
    patch.setattr(Link, "_publish", lambda self, body: publish(self, body[: self.broker.max_fragment - 48]))


TestSendsOnePartOnly = Broken.failing(
    "test_a_message_over_the_limit_arrives_in_parts",
    "test_small_answers_pass_between_the_parts_of_large_ones",
    "test_messages_sent_before_closing_still_arrive",
    fault=one_part_only,
)


TestIgnoresTheLimitOfTheWorker = Broken.failing(
    "test_a_request_larger_than_the_worker_takes_is_refused_once_its_limit_is_known",
    fault=lambda real, self, patch: patch.setattr(CallerLink, "limit", property(lambda self: 2**30)),
)


TestDoesNotNoticeAbsence = Broken.failing(
    "test_a_call_to_an_address_without_listener_fails_at_once",
    "test_a_restarted_worker_with_the_same_id_is_not_mistaken_for_it",
    "test_a_worker_that_dies_is_noticed_by_its_callers",
    "test_a_caller_that_dies_is_noticed_by_its_workers",
    fault=lambda real, self, patch: patch.setattr(Link, "absent", lambda self: None),
)


TestSendsToAnyAddress = Broken.failing(
    "test_a_malformed_address_is_never_sent_to",
    fault=lambda real, self, patch: patch.setattr(Addresses, "is_worker", lambda self, text: True),
)


def one_link_name(real: Any, self: Any, patch: pytest.MonkeyPatch) -> None:
    begin: Any = CallerLink.__init__

    def named_alike(self: CallerLink, peers: Peers, address: str, name: str) -> None:
        begin(self, peers, address, name.partition(".")[0] + ".1")

    patch.setattr(CallerLink, "__init__", named_alike)


TestNamesLinksAlike = Broken.failing("test_a_reconnected_caller_gets_a_new_link", fault=one_link_name)


TestNamesCallersAlike = Broken.failing(
    "test_two_processes_that_call_one_worker_do_not_touch_each_other",
    fault=lambda real, self, patch: patch.setattr(
        "dynamo_wire.brokered.calling.secrets.token_hex", lambda number: "0" * 2 * number
    ),
)


def endless_silence(real: Any, self: Any, patch: pytest.MonkeyPatch) -> None:
    check: Any = Liveness.check

    def patient(self: Liveness, now: float, *, used: bool) -> Action:
        action: Action = check(self, now, used=used)
        if action is not Action.GIVE_UP:
            return action
        self.due = now + 1.0
        return Action.PING

    patch.setattr(Liveness, "check", patient)


TestIsPatientForEver = Broken.failing("test_a_silent_end_is_given_up", fault=endless_silence)


TestHidesThatAnAcceptanceIsLate = Broken.failing(
    "test_a_worker_that_does_not_accept_in_time_is_given_up",
    fault=lambda real, self, patch: patch.setattr(Calls, "_late", lambda self, cause=None: EngineShutdown("late")),
)


def numbers_ignored(real: Any, self: Any, patch: pytest.MonkeyPatch) -> None:
    take: Any = Link._take

    def taken(self: Link, fragment: Any, reply: str) -> None:
        if fragment.number >= 0:
            self._expected = fragment.number
        take(self, fragment, reply)

    patch.setattr(Link, "_take", taken)


TestIgnoresTheNumbersOfFragments = Broken.failing(
    "test_a_message_that_comes_twice_ends_the_streams_of_its_link_only",
    "test_a_lost_message_of_the_caller_is_noticed_by_the_worker",
    "test_a_lost_end_of_a_stream_is_noticed",
    fault=numbers_ignored,
)


def everything_trusted(real: Any, self: Any, patch: pytest.MonkeyPatch) -> None:
    numbers_ignored(real, self, patch)
    on_rows: Any = Calls.on_rows

    def rows_of_any_number(self: Calls, message: Any) -> None:
        for row in message.rows:
            if row.sid in self._calls:
                self._calls[row.sid].expected = row.number
        on_rows(self, message)

    patch.setattr(Link, "_check", lambda self, fragment: None)
    patch.setattr(Calls, "on_rows", rows_of_any_number)


TestTrustsWhatArrives = Broken.failing("test_no_damaged_message_corrupts_a_stream", fault=everything_trusted)


def losses_hidden(real: Any, self: Any, patch: pytest.MonkeyPatch) -> None:
    over: Any = Call.over
    patch.setattr(Call, "over", lambda self, error: over(self, None if self.begun else error))


TestEndsBrokenStreamsWell = Broken.failing(
    "test_open_calls_end_when_the_server_dies",
    "test_many_server_restarts_corrupt_no_stream",
    fault=losses_hidden,
)


def impatient(real: Any, self: Any, patch: pytest.MonkeyPatch) -> None:
    async def ready(self: Broker) -> None:
        if not self._up.is_set():
            raise Unavailable(f"the server at 127.0.0.1 is away, says {self.SERVER}")

    patch.setattr(Broker, "ready", ready)


TestDoesNotWaitForTheServer = Broken.failing(
    "test_a_new_call_waits_for_a_server_that_comes_back_empty",
    "test_a_server_that_stays_away_makes_new_calls_unavailable",
    fault=impatient,
)


def no_settling(real: Any, self: Any, patch: pytest.MonkeyPatch) -> None:
    def jitter(seconds: float) -> float:
        raise CannotConnect("the worker is not back")

    patch.setattr("dynamo_wire.brokered.calling.jitter", jitter)


TestDoesNotWaitForTheWorker = Broken.failing(
    "test_a_worker_that_comes_back_later_than_its_caller_is_waited_for", fault=no_settling
)


def silent_while_connecting(real: Any, self: Any, patch: pytest.MonkeyPatch) -> None:
    publish: Any = Broker.publish

    def later(self: Broker, *what: Any, **how: Any) -> None:
        if self._up.is_set():
            publish(self, *what, **how)

    patch.setattr(Broker, "publish", later)


TestAnswersNothingWhileItConnects = Broken.failing(
    "test_a_call_that_comes_while_a_worker_is_still_connecting_is_answered", fault=silent_while_connecting
)


def start_at_once(real: Any, self: Any, patch: pytest.MonkeyPatch) -> None:
    async def start(self: Broker, tell: Any = str) -> None:
        raise CannotConnect("no Redis server was reached within 0.2 s: 127.0.0.1\nTraceback: …")

    patch.setattr("dynamo_plugin_transport_redis.broker.RedisBroker.start", start)


TestStartsWithoutWaiting = Broken.failing(
    "test_a_server_that_is_not_there_yet_is_waited_for",
    "test_a_server_that_never_comes_ends_the_start_in_one_line",
    fault=start_at_once,
)


class WithoutAnswers(RedisTransport):
    """Says that it answers probes, and does not."""

    async def _answer_probes(self, acceptor: Acceptor) -> None:
        self._registry.probes = True


TestDoesNotAnswerProbes = Broken.failing(
    "test_a_busy_worker_survives_a_server_restart",
    fault=lambda real, self, patch: patch.setattr(redis_bench.RedisBench, "TRANSPORT", WithoutAnswers),
)


def connections_left(real: Any, self: Any, patch: pytest.MonkeyPatch) -> None:
    left: list[Any] = []

    async def aclose(self: _RedisSession) -> None:
        self.gone.set()
        left.append(asyncio.ensure_future(asyncio.sleep(60)))

    patch.setattr(_RedisSession, "aclose", aclose)


TestLeavesConnectionsAndTasks = Broken.failing(
    "test_a_closed_transport_leaves_no_connection_and_no_subscription",
    "test_connections_that_broke_in_the_middle_of_writing_leave_no_task_behind",
    fault=connections_left,
)


def links_kept(real: Any, self: Any, patch: pytest.MonkeyPatch) -> None:
    for kind in (CallerLink, WorkerLink):
        patch.setattr(kind, "unused", lambda self, seconds: None)


TestKeepsUnusedLinks = Broken.failing("test_an_unused_link_is_dropped_and_reopened", fault=links_kept)


TestDoesNotRenewLinks = Broken.failing(
    "test_a_worker_that_has_forgotten_a_caller_is_called_over_a_new_link",
    fault=lambda real, self, patch: patch.setattr(
        CallerLink, "unknown", lambda self: self.finish(CannotConnect("forgotten"))
    ),
)


def drops_uncounted(real: Any, self: Any, patch: pytest.MonkeyPatch) -> None:
    send: Any = plane.BrokeredPublisher.send
    patch.setattr(plane.BrokeredPublisher, "send", lambda self, payload: self._broker.connected and send(self, payload))


TestCountsNoEvents = Broken.failing("test_events_that_cannot_be_sent_are_refused_and_counted", fault=drops_uncounted)


TestSendsEachEventAlone = Broken.failing(
    "test_the_events_of_one_turn_leave_in_few_messages",
    fault=lambda real, self, patch: patch.setattr(plane, "EVENT_MESSAGE", 1),
)


def published_twice(real: Any, self: Any, patch: pytest.MonkeyPatch) -> None:
    publisher: Any = plane.BrokeredEvents.publisher

    async def again(self: plane.BrokeredEvents, subject: str, lease: Any) -> Any:
        self._publishers.pop((subject, lease.id), None)
        return await publisher(self, subject, lease)

    patch.setattr(plane.BrokeredEvents, "publisher", again)


TestPublishesTwice = Broken.failing("test_a_lease_publishes_on_a_subject_once", fault=published_twice)
