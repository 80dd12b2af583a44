"""Sessions end: with their time, with the token that began them, and with those that come after them."""

from __future__ import annotations

from dynamo_plugin_extension_dashboard.sessions import FAILURES, OPERATOR, SESSIONS, VIEWER, WINDOW, Sessions


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_session_is_found_by_its_cookie_only() -> None:
    sessions = Sessions(60, Clock())
    cookie, session = sessions.begin(VIEWER)

    assert sessions.find(cookie) is session
    assert sessions.find(None) is None
    assert sessions.find("") is None
    assert sessions.find(session.csrf) is None
    assert session.csrf not in repr(session)


def test_a_session_ends_with_its_time() -> None:
    clock = Clock()
    sessions = Sessions(60, clock)
    cookie, _ = sessions.begin(OPERATOR)

    clock.now = 59.9
    assert sessions.find(cookie) is not None
    clock.now = 60.0
    assert sessions.find(cookie) is None


def test_a_session_ends_with_the_token_that_began_it() -> None:
    tokens = {"first"}
    sessions = Sessions(60, Clock())
    cookie, _ = sessions.begin(OPERATOR, lambda: "first" in tokens)
    assert sessions.find(cookie) is not None

    tokens.clear()
    assert sessions.find(cookie) is None


def test_the_session_that_was_used_longest_ago_makes_room() -> None:
    sessions = Sessions(60, Clock())
    cookies = [sessions.begin(VIEWER)[0] for _ in range(SESSIONS)]
    assert sessions.find(cookies[0]) is not None

    sessions.begin(VIEWER)

    assert sessions.find(cookies[0]) is not None
    assert sessions.find(cookies[1]) is None


def test_failed_logins_close_the_door_for_a_while() -> None:
    clock = Clock()
    sessions = Sessions(60, clock)
    for number in range(FAILURES):
        assert sessions.wait == 0
        clock.now = float(number)
        sessions.failed()

    assert sessions.wait == WINDOW - (FAILURES - 1)
    clock.now = WINDOW
    assert sessions.wait == 0
