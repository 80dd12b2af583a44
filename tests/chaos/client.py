"""An honest client of a frontend, and crowds of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Self

import aiohttp

from tests.chaos.history import Answer, Asked, End, History, answer_in


class Client:
    """Asks one frontend. Every request has its own connection, and no time limit but its own deadline."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/v1/chat/completions"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def ask(self, asked: Asked, history: History | None = None, *, leave: asyncio.Event | None = None) -> History:
        """Return one request, to its end, or until the client is told to `leave`."""
        history = history or History(asked)
        clock = asyncio.get_running_loop().time
        history.sent = clock()
        asking = asyncio.ensure_future(self._ask(asked, history, clock))
        leaving = None if leave is None else asyncio.ensure_future(leave.wait())
        waited = [asking] if leaving is None else [asking, leaving]
        try:
            await asyncio.wait(waited, timeout=asked.deadline, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                history.over(clock(), await asking)
            else:
                history.over(clock(), End.LEFT if leaving is not None and leaving.done() else End.HUNG)
        finally:
            for task in waited:
                task.cancel()
            await asyncio.wait(waited)
        return history

    async def _ask(self, asked: Asked, history: History, clock: Callable[[], float]) -> End:
        assert self._session is not None
        try:
            async with self._session.post(self._url, json=asked.body()) as response:
                history.answered(response.status, response.headers)
                async for data in response.content.iter_any():
                    history.came(clock(), data)
        except (aiohttp.ClientError, OSError):
            return End.ABORTED
        return End.CLEAN

    async def answers(self, asked: Iterable[Asked]) -> dict[int, Answer]:
        """Return the unary answers to these requests, by seed: what an unbroken run says."""
        answers: dict[int, Answer] = {}
        assert self._session is not None
        for one in asked:
            plain = replace(one, stream=False, model="mock-model")
            async with self._session.post(self._url, json=plain.body()) as got:
                assert got.status == 200, await got.text()
                answers[one.seed] = answer_in(await got.json())
        return answers


class Crowd:
    """Requests that run at the same time. The first `leaving` of them go away when they are told to."""

    def __init__(self, client: Client, asked: Sequence[Asked], *, leaving: int = 0) -> None:
        self.histories = [History(one) for one in asked]
        self.leaving = asked[:leaving]
        self._leave = asyncio.Event()
        self._tasks = [
            asyncio.ensure_future(client.ask(history.asked, history, leave=self._leave if at < leaving else None))
            for at, history in enumerate(self.histories)
        ]

    async def begun(self) -> None:
        """Return when every stream has said something, or has ended."""
        for history in self.histories:
            if history.asked.stream:
                await history.begun.wait()

    def leave(self) -> None:
        """Cancel the streams that were to leave."""
        self._leave.set()

    async def end(self) -> list[History]:
        """Return the histories, when all have ended: each has a deadline."""
        await asyncio.gather(*self._tasks)
        return self.histories

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
