"""The line between a supervisor and a child: words and frames in any order, cut anywhere, with a deadline for each."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from dynamo_core.errors import Disconnected, ResponseTimeout
from dynamo_runtime.processes.control import ANSWER, CUT, HURRY, QUESTION, READY, REASON, ChildLine, ParentPipe
from hypothesis import given
from hypothesis import strategies as st


class Wishes:
    """Notes what the child is told to do, in the place of its signals."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.changed = asyncio.Event()

    def expect_end(self, *, hurried: bool = False) -> None:
        pass

    def arrived(self, hurried: bool = False) -> None:
        self._note("hurry")

    def cut(self) -> None:
        self._note("cut")

    def _note(self, what: str) -> None:
        self.told.append(what)
        self.changed.set()

    async def until(self, count: int) -> list[str]:
        """Return what was told, once it is so much: each word comes by itself."""
        while len(self.told) < count:
            self.changed.clear()
            await self.changed.wait()
        return self.told


async def echo(body: Any) -> Any:
    return {"echo": body if isinstance(body, int) else len(body)}


@asynccontextmanager
async def both(wishes: Wishes | None = None, **parent: Any) -> AsyncIterator[tuple[ChildLine, ParentPipe]]:
    theirs, ours = socket.socketpair()
    child = ParentPipe(theirs.fileno(), wishes or Wishes())  # type: ignore[arg-type]
    before = set(threading.enumerate())
    try:
        async with ChildLine(ours, **parent) as line, child:
            child.start()
            yield line, child
    finally:
        # Its thread reads the end, and would give the process up.
        for thread in set(threading.enumerate()) - before:
            if thread.name == "parent pipe":
                await asyncio.to_thread(thread.join, 10)
        theirs.close()


@pytest.fixture(autouse=True)
def _no_orphans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamo_runtime.processes.control.give_up", lambda why: None)
    monkeypatch.setattr("dynamo_runtime.processes.control.ORPHAN_GRACE", 0.0)


async def test_both_ends_ask_and_answer_concurrently() -> None:
    async with both(answerer=echo) as (line, child):
        child.answer_with(echo)

        answers = await asyncio.gather(
            *(end.ask(number, 10) for number in range(20) for end in (line, child)), line.ask("x" * 1_000_000, 10)
        )

        assert [answer["echo"] for answer in answers[:-1]] == [number for number in range(20) for _ in range(2)]
        assert answers[-1]["echo"] == 1_000_000


async def test_words_go_between_frames() -> None:
    wishes = Wishes()
    async with both(wishes, answerer=echo) as (line, child):
        child.answer_with(echo)
        asking = asyncio.create_task(line.ask("y" * 1_000_000, 10))
        await asyncio.sleep(0)
        line.say(HURRY)
        line.say(CUT)
        child.say_ready()

        assert (await asking)["echo"] == 1_000_000
        assert await wishes.until(2) == ["hurry", "cut"]
        assert line.has_served()


async def test_an_unready_child_answers_null_at_once() -> None:
    async with both() as (line, _):
        assert await line.ask("anything", 10) is None


async def test_a_child_that_does_not_answer_is_not_waited_for_longer_than_asked() -> None:
    async def never(body: Any) -> Any:
        await asyncio.Event().wait()

    async with both() as (line, child):
        child.answer_with(never)
        with pytest.raises(ResponseTimeout):
            await line.ask("anything", 0.01)


async def test_a_child_that_ends_answers_nothing_more() -> None:
    theirs, ours = socket.socketpair()
    async with ChildLine(ours) as line:
        asking = asyncio.create_task(line.ask("anything", 10))
        await asyncio.sleep(0)
        theirs.close()

        with pytest.raises(Disconnected):
            await asking
        with pytest.raises(Disconnected):
            await line.ask("more", 10)


async def test_the_reason_is_everything_that_follows_it_and_is_still_known_after_the_end() -> None:
    theirs, ours = socket.socketpair()
    async with ChildLine(ours) as line:
        theirs.send(REASON + b"router.use: qr")
        theirs.close()

        assert line.reason() == "router.use: qr"
        assert not line.has_served()


async def test_a_malformed_message_is_logged_and_skipped(caplog: pytest.LogCaptureFixture) -> None:
    theirs, ours = socket.socketpair()
    async with ChildLine(ours) as line:
        for data in (b"", b"{}", b'{"number": "x", "body": 1}', b"\xff" * 9):
            theirs.send(QUESTION + len(data).to_bytes(4, "big") + data)
        theirs.send(READY)

        assert line.has_served()
    assert caplog.text.count("cannot be read") == 4
    theirs.close()


_PIECES = st.lists(
    st.one_of(st.just(READY), st.binary(max_size=8).map(lambda data: ANSWER + len(data).to_bytes(4, "big") + data)),
    max_size=6,
)


@given(pieces=_PIECES, reason=st.none() | st.text(max_size=20), cuts=st.lists(st.integers(1, 20), max_size=20))
def test_messages_are_read_however_the_stream_is_cut(pieces: list[bytes], reason: str | None, cuts: list[int]) -> None:
    stream = b"".join(pieces) + (b"" if reason is None else REASON + reason.encode())

    async def check() -> None:
        theirs, ours = socket.socketpair()
        with theirs:
            async with ChildLine(ours) as line:
                rest = stream
                for cut in [*cuts, len(stream) + 1]:
                    theirs.send(rest[:cut]) if rest else None
                    rest = rest[cut:]
                    line._listen()

                assert line.has_served() is (READY in pieces)
                assert line.reason() == (reason or "")
                assert not line._heard

    asyncio.run(check())
