"""The kit for frontends: routes, tokenizers, and the end of every request.

The author's whole test file::

    import pytest
    from dynamo_testing.frontend_kit import Asked, FrontendFactory, FrontendKit

    class TestMine(FrontendKit):
        @pytest.fixture
        def make_frontend(self) -> FrontendFactory:
            return lambda services: MyFrontend(MyConfig(), services)

        def ask(self, model: str, prompt: str) -> Asked:
            return Asked("POST", "/generate", {"model": model, "prompt": prompt})

The kit has the listener, the accounting and the models. `ask` words a request that is answered in one piece, and that
holds the prompt as it is. `ask_streaming` words one whose answer comes as it is made; checks of that are skipped
without it, and those of any request without `ask`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, TypeAlias

import aiohttp
from dynamo_core.contracts.frontend import Frontend, FrontendServices
from dynamo_core.contracts.http_route import ListenerName
from dynamo_core.errors import ConfigError, DynamoError, EngineShutdown, InvalidArgument, ServiceOverloaded, problem_of
from dynamo_core.protocol.output import FinishReason
from dynamo_core.protocol.records import RequestRecord
from dynamo_core.tasks import TaskSet

from dynamo_testing.frontend.host import MODEL, OTHER, WORKER, Answering, House
from dynamo_testing.optional_packages import pytest

__all__ = ["Asked", "FrontendFactory", "FrontendKit", "House"]

#: Makes the frontend under test, not yet started.
FrontendFactory: TypeAlias = Callable[[FrontendServices], Frontend]

_METHODS = {"DELETE", "GET", "HEAD", "PATCH", "POST", "PUT"}
_PATH = re.compile(r"/\S*")
#: Bodies that are no request of any API.
BROKEN = (b"", b"{", b"[]", b"null", b"7", b"\xff\xfe", b'{"model": 7}', b"[" * 5000)
#: A text that shows unchanged in JSON.
TEXT = "quagga okapi"


class Asked(NamedTuple):
    """A request in the words of an API. `body` is sent as JSON; bytes are sent as they are."""

    method: str
    path: str
    body: Any
    headers: dict[str, str] | None = None


class Reply(NamedTuple):
    """An answer."""

    status: int
    headers: dict[str, str]
    text: str


@pytest.mark.asyncio
class FrontendKit:
    """All checks of a frontend. Subclass it as ``Test…``, write the fixture `make_frontend` and the method `ask`."""

    #: Seconds that anything may take before a check fails.
    WAIT: ClassVar[float] = 5.0

    @pytest.fixture
    def make_frontend(self) -> FrontendFactory:
        """Make the frontend from its services. Every author writes this one."""
        raise NotImplementedError("write a fixture `make_frontend` that returns a function of FrontendServices")

    def ask(self, model: str, prompt: str) -> Asked:
        """Return a request that is answered in one piece."""
        pytest.skip("the class has no method `ask`, which words a request")

    def ask_streaming(self, model: str, prompt: str) -> Asked:
        """Return a request that is answered as the answer is made."""
        pytest.skip("the class has no method `ask_streaming`, which words a request for a stream")

    @pytest.fixture
    async def house(self, make_frontend: FrontendFactory) -> AsyncIterator[House]:
        """Yield the frontend, started, behind a listener."""
        house = House(make_frontend)
        try:
            async with asyncio.timeout(self.WAIT):
                await house.start()
            yield house
        finally:
            await house.aclose()

    # The frontend itself.

    async def test_its_routes_are_sound_and_each_is_there_once(self, make_frontend: FrontendFactory) -> None:
        house = House(make_frontend)
        seen = set()
        for route in house.routes:
            where = (route.method, route.path, route.listener)
            assert route.method in _METHODS, f"{where}: there is no such method"
            assert _PATH.fullmatch(route.path), f"{where}: the path must begin with a slash and hold no space"
            assert route.summary, f"{where}: a line of summary is missing, for the list of routes"
            assert where not in seen, f"{where}: there twice"
            seen.add(where)
        claims = set(house.frontend.claims(house.frontend.config))
        known = {route.claim for route in house.routes if route.listener is ListenerName.PUBLIC}
        assert not claims or claims == known, f"claimed and not served, or the other way: {claims ^ known}"
        await house.aclose()

    async def test_the_frontend_can_be_closed_twice_and_without_a_start(self, make_frontend: FrontendFactory) -> None:
        before = asyncio.all_tasks()
        unstarted = House(make_frontend)
        await unstarted.aclose()
        house = House(make_frontend)
        await house.start()
        await house.aclose()
        await house.aclose()
        await asyncio.sleep(0)

        assert asyncio.all_tasks() - before == set(), "tasks go on after `aclose`"

    async def test_bytes_are_the_tokens_of_a_model_without_files(self, house: House) -> None:
        tokenizer = house.get(MODEL).tokenizer

        for text in ("", "abc", "Grüße, 世界 🎉"):
            assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode("abc", add_special_tokens=False) == list(b"abc")

    async def test_an_unloadable_tokenizer_is_a_config_error(self, house: House) -> None:
        for kind, files in (("no-such-kind", {}), ("hf", {}), ("hf", {"tokenizer.json": b"{"})):
            with pytest.raises(ConfigError):
                house.frontend.load_tokenizer(kind, files)

    # Requests.

    async def test_a_prompt_reaches_its_model_and_the_answer_its_client(self, house: House) -> None:
        model = house.get(MODEL)
        model.says(TEXT)

        reply = await self.reply(house, self.ask(MODEL, "zebra"))

        assert (reply.status, TEXT in reply.text) == (200, True), reply
        request = (await self.within(model.request())).request
        assert request.model == MODEL
        assert "zebra" in model.tokenizer.decode(request.token_ids)

    async def test_an_answered_request_is_recorded_once_and_its_stream_closed(self, house: House) -> None:
        house.get(MODEL).says(TEXT)
        await self.reply(house, self.ask(MODEL, "zebra"))
        answering = await self.within(house.get(MODEL).request())

        record = await self.record(house)

        assert (record.status, record.model, record.instance_id) == ("success", MODEL, WORKER)
        assert record.prompt_tokens == len(answering.request.token_ids)
        assert (record.output_tokens, record.finish_reason) == (len(TEXT), "stop")
        await self.within(answering.closed.wait())

    async def test_requests_side_by_side_do_not_mix(self, house: House) -> None:
        for name in (MODEL, OTHER):
            house.get(name).says(f"{TEXT} of {name}")

        asked = [(name, self.reply(house, self.ask(name, f"zebra {name}"))) for name in (MODEL, OTHER) * 4]
        replies = await asyncio.gather(*(reply for _, reply in asked))

        for (name, _), reply in zip(asked, replies, strict=True):
            assert f"{TEXT} of {name}" in reply.text

    async def test_an_error_has_the_status_of_cores_table(self, house: House) -> None:
        errors: tuple[DynamoError, ...] = (
            ServiceOverloaded(retry_after=7.0),
            InvalidArgument("no"),
            EngineShutdown("x"),
        )
        for error in errors:
            house.get(MODEL).refusal = error
            problem = problem_of(error)

            reply = await self.reply(house, self.ask(MODEL, "zebra"))

            assert reply.status == problem.status, f"{type(error).__name__}: {reply}"
            retry = None if problem.retry_after is None else str(problem.retry_after)
            assert reply.headers.get("retry-after") == retry
            record = await self.record(house)
            assert (record.status, record.http_status) == ("error", problem.status)

    async def test_a_failure_in_mid_answer_is_no_answer(self, house: House) -> None:
        def break_off(answering: Answering) -> None:
            answering.say(TEXT)
            answering.fail(EngineShutdown("gone"))

        house.get(MODEL).script = break_off

        reply = await self.reply(house, self.ask(MODEL, "zebra"))

        assert reply.status >= 500, reply
        assert (await self.record(house)).status == "error"
        await self.within((await house.get(MODEL).request()).closed.wait())

    async def test_a_model_that_is_not_there_is_not_found(self, house: House) -> None:
        assert (await self.reply(house, self.ask("no-such-model", "zebra"))).status == 404

    async def test_a_model_that_the_key_does_not_cover_does_not_exist(self, house: House) -> None:
        house.get(MODEL).says(TEXT)
        house.principal = replace(house.principal, models=frozenset({OTHER}))

        covered = await self.reply(house, self.ask(MODEL, "zebra"))

        assert (covered.status, TEXT in covered.text) == (404, False)

    async def test_a_body_that_is_no_request_is_the_clients_error(self, house: House) -> None:
        asked = self.ask(MODEL, "zebra")

        for body in BROKEN:
            reply = await self.reply(house, asked._replace(body=body))

            assert 400 <= reply.status < 500, f"{body[:20]!r}: {reply}"

    async def test_a_client_that_leaves_ends_its_request(self, house: House) -> None:
        tasks = TaskSet()
        tasks.spawn(self.reply(house, self.ask(MODEL, "zebra")), name="kit-client")
        answering = await self.within(house.get(MODEL).request())

        await tasks.aclose()

        await self.within(answering.closed.wait())
        assert (await self.record(house)).status == "error"

    async def test_a_stream_is_sent_as_it_is_made(self, house: House) -> None:
        async with self.streaming(house) as (response, answering):
            seen = await self.within(response.content.readuntil(b"quagga"))
            answering.say("okapi", FinishReason.STOP)
            rest = await self.within(response.content.read())

        assert response.status == 200
        assert b"okapi" not in seen
        assert b"okapi" in rest
        record = await self.record(house)
        assert (record.status, record.request_type) == ("success", "stream")
        assert record.output_tokens == len("quaggaokapi")

    async def test_a_client_that_leaves_a_stream_ends_its_request(self, house: House) -> None:
        async with self.streaming(house) as (response, answering):
            await self.within(response.content.readuntil(b"quagga"))

        answering.say("more")
        await self.within(answering.closed.wait())
        assert (await self.record(house)).status == "error"

    # What the checks use.

    def session(self, house: House) -> aiohttp.ClientSession:
        """Return a client of its own, so that no connection is kept."""
        return aiohttp.ClientSession(house.url, timeout=aiohttp.ClientTimeout(self.WAIT), read_bufsize=2**20)

    def sent(self, session: aiohttp.ClientSession, asked: Asked) -> Any:
        """Return a request, as a context whose value is the response."""
        body = asked.body if isinstance(asked.body, bytes) else json.dumps(asked.body).encode()
        headers = {"content-type": "application/json", **(asked.headers or {})}
        return session.request(asked.method, asked.path, data=body, headers=headers)

    @asynccontextmanager
    async def streaming(self, house: House) -> AsyncIterator[tuple[aiohttp.ClientResponse, Answering]]:
        """Yield a stream whose first text is on its way. A frontend may send nothing before there is text."""
        asked = self.ask_streaming(MODEL, "zebra")
        tasks = TaskSet()
        async with self.session(house) as session, aclosing(tasks):
            opening = tasks.spawn(self.sent(session, asked).__aenter__(), name="kit-client")
            answering = await self.within(house.get(MODEL).request())
            answering.say("quagga")
            response = await self.within(opening)
            try:
                yield response, answering
            finally:
                response.close()

    async def reply(self, house: House, asked: Asked) -> Reply:
        """Return the whole answer to a request."""
        async with self.session(house) as session, self.sent(session, asked) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            return Reply(response.status, headers, await response.text(errors="replace"))

    async def record(self, house: House) -> RequestRecord:
        """Return the record of the next request that has ended; it must be the only one."""
        record: RequestRecord = await self.within(house.records.get())
        assert house.records.empty(), "one request is recorded twice"
        return record

    async def within(self, waited: Any) -> Any:
        """Return what is waited for, in the time that anything may take."""
        try:
            async with asyncio.timeout(self.WAIT):
                return await waited
        except TimeoutError:
            raise AssertionError(f"what was waited for did not happen within {self.WAIT} s") from None
