"""Sessions end: with their time, with the token that began them, and with those that come after them."""

from __future__ import annotations

import pytest
from dynamo_plugin_extension_dashboard.sessions import (
    ADDRESSES,
    FORGOTTEN,
    FREE,
    LONGEST,
    OPERATOR,
    SESSIONS,
    VIEWER,
    FailedLogins,
    Sessions,
)

from plugins.conftest import Clock


def test_a_session_is_found_by_its_cookie_only() -> None:
    sessions = Sessions(60, Clock(0.0))
    cookie, session = sessions.begin(VIEWER)

    assert sessions.find(cookie) is session
    assert sessions.find(None) is None
    assert sessions.find("") is None
    assert sessions.find(session.csrf) is None
    assert session.csrf not in repr(session)


def test_a_session_ends_with_its_time() -> None:
    clock = Clock(0.0)
    sessions = Sessions(60, clock)
    cookie, _ = sessions.begin(OPERATOR)

    clock.now = 59.9
    assert sessions.find(cookie) is not None
    clock.now = 60.0
    assert sessions.find(cookie) is None


def test_a_session_ends_with_the_token_that_began_it() -> None:
    tokens = {"first"}
    sessions = Sessions(60, Clock(0.0))
    cookie, _ = sessions.begin(OPERATOR, lambda: "first" in tokens)
    assert sessions.find(cookie) is not None

    tokens.clear()
    assert sessions.find(cookie) is None


def test_the_session_that_was_used_longest_ago_makes_room() -> None:
    sessions = Sessions(60, Clock(0.0))
    cookies = [sessions.begin(VIEWER)[0] for _ in range(SESSIONS)]
    assert sessions.find(cookies[0]) is not None

    sessions.begin(VIEWER)

    assert sessions.find(cookies[0]) is not None
    assert sessions.find(cookies[1]) is None


def test_an_address_that_goes_on_guessing_waits_longer_each_time() -> None:
    clock = Clock(0.0)
    failed = FailedLogins(clock)
    assert [failed.add("192.0.2.1") for _ in range(FREE)] == [0.0] * FREE

    waits = []
    for _ in range(10):
        waits.append(failed.add("192.0.2.1"))
        clock.now += waits[-1]
        assert failed.add("192.0.2.1") == 0

    assert waits == [min(2.0**number, LONGEST) for number in range(10)]


def test_an_address_begins_anew_after_a_while() -> None:
    clock = Clock(0.0)
    failed = FailedLogins(clock)
    for _ in range(FREE):
        failed.add("192.0.2.1")
    assert failed.add("192.0.2.1") > 0

    clock.now += FORGOTTEN + LONGEST

    assert [failed.add("192.0.2.1") for _ in range(FREE)] == [0.0] * FREE


@pytest.mark.parametrize(
    ("other", "waits"),
    [("192.0.2.2", False), ("2001:db8::ffff", True), ("2001:db8:0:1::1", False), (None, False)],
)
def test_only_the_guesses_of_one_host_count_together(other: str | None, waits: bool) -> None:
    failed = FailedLogins(Clock(0.0))
    for _ in range(FREE):
        failed.add("2001:db8::1")

    assert (failed.add(other) > 0) is waits


def test_the_address_that_failed_longest_ago_makes_room() -> None:
    failed = FailedLogins(Clock(0.0))
    for number in range(ADDRESSES):
        for _ in range(FREE):
            failed.add(f"10.0.{number // 256}.{number % 256}")

    failed.add("192.0.2.1")

    assert failed.add("10.0.0.1") > 0
    assert failed.add("10.0.0.0") == 0
