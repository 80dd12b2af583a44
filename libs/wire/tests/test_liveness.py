"""When a link is given up: after its silence, never before, and never while the worker is only busy."""

from __future__ import annotations

from dataclasses import dataclass, field

from dynamo_wire.liveness import (
    ASKED,
    BEYOND_LEASE,
    RESOLUTION,
    WITHOUT_PROBES,
    WITHOUT_TTL,
    Action,
    Liveness,
    silence_limit,
)
from hypothesis import given
from hypothesis import strategies as st

HEARTBEATS = st.floats(0.05, 10)
SILENCES = st.floats(0.2, 60)


@dataclass
class Life:
    """A link whose looks come in time, and what it asked for."""

    heartbeat: float
    silence: float
    start: float = 0.0
    actions: list[tuple[float, Action]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.liveness = Liveness(self.heartbeat, self.silence, self.start)
        self.now = self.start

    def until(self, end: float, *, used: bool = True) -> bool:
        """Look whenever that is due, up to a time; False once the link is given up."""
        while self.liveness.due <= end:
            self.now = self.liveness.due
            action = self.liveness.check(self.now, used=used)
            self.actions.append((self.now, action))
            if action is Action.GIVE_UP:
                return False
            assert self.liveness.due > self.now
        self.now = end
        return True

    def count(self, action: Action) -> int:
        return sum(done is action for _, done in self.actions)


@given(HEARTBEATS, SILENCES, st.floats(0, 1e6))
def test_silence_without_an_answer_ends_the_link_in_time_and_not_before_it_was_asked(
    heartbeat: float, silence: float, start: float
) -> None:
    life = Life(heartbeat, silence, start)

    assert not life.until(start + 2 * silence)

    assert abs(life.now - start - silence) <= 2 * RESOLUTION
    assert life.count(Action.PING) >= ASKED - 1
    assert life.count(Action.PROBE) >= ASKED - 1


@given(
    HEARTBEATS, SILENCES, st.lists(st.tuples(st.floats(0.01, 0.99), st.sampled_from(["heard", "busy"])), max_size=20)
)
def test_a_link_with_signs_of_life_is_kept_and_given_up_after_the_last_of_them(
    heartbeat: float, silence: float, signs: list[tuple[float, str]]
) -> None:
    life = Life(heartbeat, silence)

    for part, kind in signs:
        assert life.until(life.now + part * silence)
        if kind == "heard":
            life.liveness.heard(life.now)
        else:
            life.liveness.report_busy(life.now)
    last = life.now

    assert not life.until(last + 2 * silence)
    assert abs(life.now - last - silence) <= 2 * RESOLUTION


@given(HEARTBEATS, SILENCES, st.floats(1.01, 1000))
def test_while_this_process_sleeps_nothing_is_counted(heartbeat: float, silence: float, steps: float) -> None:
    life = Life(heartbeat, silence)
    assert life.until(0.9 * silence)

    woken = life.liveness.due + steps * min(heartbeat, silence / ASKED)
    action = life.liveness.check(woken, used=True)

    assert action is Action.NOTHING
    life.now = woken
    assert life.until(woken + 0.99 * silence)
    assert not life.until(woken + 1.01 * silence)


@given(HEARTBEATS, SILENCES, st.floats(0.01, 0.5))
def test_late_checks_do_not_shorten_the_silence_limit(heartbeat: float, silence: float, late: float) -> None:
    liveness, lag = Liveness(heartbeat, silence, 0.0), late * min(heartbeat, silence / ASKED)
    now, slept = 0.0, 0.0
    for _ in range(10_000):
        now = liveness.due + lag
        slept += lag
        if liveness.check(now, used=True) is Action.GIVE_UP:
            break

    assert silence - 2 * RESOLUTION <= now - slept + lag
    assert now - slept <= silence + lag


@given(HEARTBEATS, SILENCES)
def test_a_link_that_is_not_used_is_neither_asked_nor_given_up(heartbeat: float, silence: float) -> None:
    life = Life(heartbeat, silence)

    assert life.until(10 * silence, used=False)
    assert {action for _, action in life.actions} == {Action.NOTHING}

    begun = life.now
    assert life.until(begun + 0.6 * silence)
    assert not life.until(begun + 1.1 * silence)


@given(HEARTBEATS, SILENCES)
def test_a_link_over_which_something_comes_is_not_asked(heartbeat: float, silence: float) -> None:
    life, step = Life(heartbeat, silence), min(heartbeat, silence / ASKED)

    for _ in range(50):
        assert life.until(life.now + 0.5 * step)
        life.liveness.heard(life.now)

    assert life.count(Action.PING) == life.count(Action.PROBE) == 0


def test_a_spell_of_being_busy_is_news_once_until_something_comes() -> None:
    liveness = Liveness(1.0, 4.0, 0.0)

    assert [liveness.report_busy(now) for now in (1.0, 2.0, 3.0)] == [True, False, False]
    during = liveness.busy
    liveness.heard(4.0)
    assert (during, liveness.busy) == (True, False)
    assert liveness.report_busy(5.0)


def test_the_silence_limit_defaults_to_the_lease_ttl() -> None:
    assert silence_limit(None, 3.0, probes=True) == 3.0 + BEYOND_LEASE
    assert silence_limit(None, None, probes=True) == WITHOUT_TTL
    assert silence_limit(None, 3.0, probes=False) == WITHOUT_PROBES
    assert silence_limit(2.0, 3.0, probes=True) == silence_limit(2.0, None, probes=False) == 2.0
