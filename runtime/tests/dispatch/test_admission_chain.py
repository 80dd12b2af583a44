"""Several admissions in turn: whatever they do, every permit that one gives is released once, in the reverse order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from dynamo_core.contracts.admission import Admission, AdmissionServices, Permit
from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.requests.principal import Principal
from dynamo_core.contracts.thresholds import RankLoad
from dynamo_core.errors import DynamoError, ServiceOverloaded
from dynamo_core.protocol.request import PreprocessedRequest
from dynamo_runtime.dispatch.admission import AdmissionChain, NoAdmission
from dynamo_telemetry.metrics import Metrics
from hypothesis import event, given, settings
from hypothesis import strategies as st

REQUEST = PreprocessedRequest(model="m", token_ids=[1])
SERVICES = AdmissionServices(Metrics(), retry_after=lambda model: 7.0)
PATIENCE = 1000.0

GRANT, REFUSE, BREAK, WAIT, FOR_EVER, KEEP_CANCEL = "grant", "refuse", "break", "wait", "for ever", "keep the cancel"


@dataclass
class Ledger:
    """What was given and released, in order."""

    given: list[int] = field(default_factory=list)
    released: list[tuple[int, int]] = field(default_factory=list)

    def assert_settled(self, tokens: int) -> None:
        assert self.released == [(number, tokens) for number in reversed(self.given)]


class Recorded(Permit):
    """A permit that enters its release into the ledger, and may fail afterwards."""

    __slots__ = ("_fails", "_ledger", "_number")

    def __init__(self, number: int, ledger: Ledger, *, fails: bool) -> None:
        self._number, self._ledger, self._fails = number, ledger, fails
        ledger.given.append(number)

    def release(self, output_tokens: int) -> None:
        self._ledger.released.append((self._number, output_tokens))
        if self._fails:
            raise RuntimeError("this permit cannot be taken back")


@dataclass(frozen=True)
class Behaviour:
    """What one plugin does with the request; a wait takes a number of turns of the loop."""

    does: str = GRANT
    turns: int = 0
    release_fails: bool = False


class Scripted(Admission):
    """Does as it is told."""

    def __init__(self, number: int, behaviour: Behaviour, ledger: Ledger) -> None:
        super().__init__(PluginConfig(), SERVICES)
        self.number, self.behaviour, self.ledger = number, behaviour, ledger

    async def admit(self, request: PreprocessedRequest, principal: Principal, pools: Sequence[Any]) -> Permit:
        does = self.behaviour.does
        for _ in range(self.behaviour.turns):
            await asyncio.sleep(0)
        if does == REFUSE:
            raise ServiceOverloaded("no", retry_after=3.0)
        if does == BREAK:
            raise RuntimeError("broken")
        if does == FOR_EVER:
            await asyncio.get_running_loop().create_future()
        if does == KEEP_CANCEL:
            with suppress(asyncio.CancelledError):
                await asyncio.get_running_loop().create_future()
        return Recorded(self.number, self.ledger, fails=self.behaviour.release_fails)


def chain_of(behaviours: Sequence[Behaviour], ledger: Ledger, patience: float = PATIENCE) -> AdmissionChain:
    parts = {str(number): Scripted(number, one, ledger) for number, one in enumerate(behaviours)}
    return AdmissionChain(parts, SERVICES, patience=patience)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


BEHAVIOURS = st.lists(
    st.builds(
        Behaviour,
        does=st.sampled_from([GRANT, GRANT, GRANT, REFUSE, BREAK]),
        turns=st.integers(0, 3),
        release_fails=st.booleans(),
    ),
    min_size=2,
    max_size=5,
)


@given(BEHAVIOURS, st.none() | st.integers(0, 12), st.integers(0, 100))
def test_every_permit_is_released_once_in_reverse_order(
    behaviours: list[Behaviour], cancel_after: int | None, tokens: int
) -> None:
    ledger = Ledger()

    async def ask() -> None:
        task = asyncio.create_task(chain_of(behaviours, ledger).admit(REQUEST, Principal(), ()))
        if cancel_after is not None:
            for _ in range(cancel_after):
                await asyncio.sleep(0)
            task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        event(type(result).__name__)
        if isinstance(result, Permit):
            assert len(ledger.given) == len(behaviours)
            assert not ledger.released
            result.release(tokens)
            result.release(tokens)
            ledger.assert_settled(tokens)
        else:
            ledger.assert_settled(0)
            first = next((one for one in behaviours if one.does != GRANT), None)
            if not isinstance(result, asyncio.CancelledError):
                assert first is not None
                assert isinstance(result, ServiceOverloaded if first.does == REFUSE else RuntimeError)

    asyncio.run(ask())


@settings(max_examples=40)
@given(
    st.lists(st.builds(Behaviour, turns=st.integers(0, 2), release_fails=st.booleans()), min_size=1, max_size=3),
    st.sampled_from([FOR_EVER, KEEP_CANCEL]),
    st.lists(st.builds(Behaviour, turns=st.integers(0, 2)), min_size=1, max_size=2),
    st.booleans(),
)
def test_a_wait_that_reaches_the_deadline_is_a_refusal_that_holds_nothing(
    before: list[Behaviour], waits: str, after: list[Behaviour], by_client: bool
) -> None:
    ledger = Ledger()
    behaviours = [*before, Behaviour(waits), *after]

    async def ask() -> None:
        now = asyncio.get_running_loop().time()
        chain = chain_of(behaviours, ledger, PATIENCE if by_client else 0.002)
        principal = Principal(deadline=now + 0.002 if by_client else now + PATIENCE)
        with pytest.raises(ServiceOverloaded) as refused:
            await chain.admit(REQUEST, principal, ())
        assert refused.value.retry_after == 7.0
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0
        ledger.assert_settled(0)
        # On a busy machine the deadline comes before the plugin that waits is asked.
        assert ledger.given == list(range(len(ledger.given)))
        assert len(ledger.given) <= len(before) + (waits == KEEP_CANCEL)

    asyncio.run(ask())


async def test_a_cancellation_from_outside_is_no_refusal() -> None:
    ledger = Ledger()
    chain = chain_of([Behaviour(), Behaviour(FOR_EVER)], ledger)
    task = asyncio.create_task(chain.admit(REQUEST, Principal(), ()))
    await asyncio.sleep(0)

    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    ledger.assert_settled(0)


async def test_a_timeout_of_a_plugin_itself_is_its_own_failure() -> None:
    class Late(Scripted):
        async def admit(self, request: PreprocessedRequest, principal: Principal, pools: Sequence[Any]) -> Permit:
            raise TimeoutError("the store did not answer")

    ledger = Ledger()
    parts = {"first": Scripted(0, Behaviour(), ledger), "late": Late(1, Behaviour(), ledger)}

    with pytest.raises(TimeoutError, match="the store"):
        await AdmissionChain(parts, SERVICES, patience=PATIENCE).admit(REQUEST, Principal(), ())
    ledger.assert_settled(0)


def test_precheck_asks_in_order_until_a_refusal() -> None:
    asked: list[int] = []

    class Checking(Scripted):
        def precheck(self, model: str, principal: Principal, pools: Sequence[Any]) -> None:
            asked.append(self.number)
            if self.behaviour.does == REFUSE:
                raise ServiceOverloaded("no", retry_after=1.0)

    kinds = [Behaviour(), Behaviour(REFUSE), Behaviour()]
    parts = {str(number): Checking(number, one, Ledger()) for number, one in enumerate(kinds)}
    chain = AdmissionChain(parts, SERVICES, patience=PATIENCE)

    with pytest.raises(DynamoError):
        chain.precheck("m", Principal(), ())
    assert asked == [0, 1]


@pytest.mark.parametrize(("says", "busy"), [((True, False), True), ((False, True), True), ((False, False), False)])
def test_a_worker_is_busy_if_any_threshold_plugin_says_so(says: tuple[bool, bool], busy: bool) -> None:
    heard: list[str] = []

    class Unarmed(Scripted):
        def is_busy(self, model: str, ranks: Sequence[RankLoad]) -> bool:
            raise AssertionError("it does not go by thresholds")

    class Armed(Scripted):
        ARMS_THRESHOLDS = True

        def is_busy(self, model: str, ranks: Sequence[RankLoad]) -> bool:
            heard.append(model)
            return says[self.number]

    ledger = Ledger()
    parts = {
        "a": Armed(0, Behaviour(), ledger),
        "b": Unarmed(2, Behaviour(), ledger),
        "c": Armed(1, Behaviour(), ledger),
    }

    assert AdmissionChain(parts, SERVICES, patience=PATIENCE).is_busy("m", [RankLoad()]) is busy
    assert heard == ["m", "m"]


def test_one_plugin_needs_no_chain_and_none_admits_everything() -> None:
    only = Scripted(0, Behaviour(), Ledger())

    assert AdmissionChain.of({"only": only}, SERVICES, patience=PATIENCE) is only
    assert isinstance(AdmissionChain.of({}, SERVICES, patience=PATIENCE), NoAdmission)
    assert isinstance(AdmissionChain.of({"a": only, "b": only}, SERVICES, patience=PATIENCE), AdmissionChain)


class Started(Scripted):
    """Notes its start and its end."""

    def __init__(self, number: int, log: list[str], fails: Callable[[str], bool] = lambda what: False) -> None:
        super().__init__(number, Behaviour(), Ledger())
        self.log, self.fails = log, fails

    def note(self, what: str) -> None:
        self.log.append(f"{what} {self.number}")
        if self.fails(what):
            raise RuntimeError(what)

    async def start(self) -> None:
        self.note("start")

    async def aclose(self) -> None:
        self.note("close")


@pytest.mark.parametrize("fails", ["", "start", "close"])
async def test_the_plugins_start_in_order_and_all_close_in_reverse(fails: str) -> None:
    log: list[str] = []
    parts = {str(number): Started(number, log, lambda what: what == fails) for number in range(2)}
    chain = AdmissionChain(parts, SERVICES, patience=PATIENCE)

    with suppress(RuntimeError):
        await chain.start()
    await chain.aclose()
    await chain.aclose()

    assert log == (["start 0"] if fails == "start" else ["start 0", "start 1"]) + ["close 1", "close 0"]


@pytest.mark.parametrize("refusing", [0, 1, 2])
async def test_a_refusal_names_the_plugin_that_has_refused(refusing: int) -> None:
    ledger = Ledger()
    does = [Behaviour(REFUSE if number == refusing else GRANT) for number in range(3)]
    parts = {f"entry-{number}": Scripted(number, behaviour, ledger) for number, behaviour in enumerate(does)}
    chain = AdmissionChain(parts, SERVICES, patience=PATIENCE)

    with pytest.raises(ServiceOverloaded) as refused:
        await chain.admit(REQUEST, Principal(), [])

    assert refused.value.plugin == f"entry-{refusing}"


def test_a_refusal_before_any_work_names_the_plugin_too() -> None:
    class Closed(Scripted):
        def precheck(self, model: str, principal: Principal, pools: Sequence[Any]) -> None:
            raise ServiceOverloaded("closed")

    ledger = Ledger()
    parts = {"open": Scripted(0, Behaviour(), ledger), "closed": Closed(1, Behaviour(), ledger)}

    with pytest.raises(ServiceOverloaded) as refused:
        AdmissionChain(parts, SERVICES, patience=PATIENCE).precheck("m", Principal(), [])

    assert refused.value.plugin == "closed"
