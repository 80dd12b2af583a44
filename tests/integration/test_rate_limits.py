"""The plugin rate-limit in a whole application behind real HTTP, and the official SDKs as its clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest
from dynamo_http.auth import hash_of, new_key

KEYS = {name: new_key() for name in ("chat", "completions", "responses", "messages")}
CONFIG = f"""
frontend: {{port: 0}}
admin: {{port: 0}}
auth: {{keys: [{", ".join(f"{{id: {name}, hash: '{hash_of(key)}'}}" for name, key in KEYS.items())}]}}
workers: {{w: {{model: {{name: m}}, engine: {{use: mocker, fixed_itl_ms: 10}}, grace_period: 0}}}}
admission: """
HI: Any = [{"role": "user", "content": "Hi"}]

Serve = Callable[[str], Awaitable[str]]


@pytest.fixture
def serve(serve_config: Serve) -> Serve:
    """Serve with this admission; give the address."""
    return lambda admission: serve_config(f"{CONFIG}{admission}\n")


class Client:
    """One of the four APIs, as its official SDK asks it, and the answers that came."""

    def __init__(self, api: str, url: str, **options: Any) -> None:
        self.api = api
        self.answers: list[Any] = []
        kit: Any = anthropic if api == "messages" else openai
        options["http_client"] = kit.DefaultAsyncHttpxClient(event_hooks={"response": [self._note]})
        self.sdk: Any
        if api == "messages":
            self.sdk = anthropic.AsyncAnthropic(base_url=url, api_key=KEYS[api], **options)
        else:
            self.sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEYS[api], **options)

    async def _note(self, response: Any) -> None:
        self.answers.append(response)

    async def ask(self) -> None:
        if self.api == "chat":
            await self.sdk.chat.completions.create(model="m", messages=HI, max_tokens=2)
        elif self.api == "completions":
            await self.sdk.completions.create(model="m", prompt="Hi", max_tokens=2)
        elif self.api == "responses":
            await self.sdk.responses.create(model="m", input="Hi", max_output_tokens=16)
        else:
            await self.sdk.messages.create(model="m", messages=HI, max_tokens=2)

    @property
    def error(self) -> type[Exception]:
        return anthropic.RateLimitError if self.api == "messages" else openai.RateLimitError


async def test_official_sdks_retry_after_the_given_time_and_succeed(serve: Serve) -> None:
    url = await serve("{use: rate-limit, requests_per_minute: 60, burst_requests: 1}")
    clients = [Client(api, url) for api in KEYS]
    try:
        again = []
        for client in clients:
            await client.ask()
            # At once: within a second from the first it is refused.
            again.append(asyncio.create_task(client.ask()))
        await asyncio.gather(*again)
    finally:
        await asyncio.gather(*(client.sdk.close() for client in clients))

    for client in clients:
        statuses = [answer.status_code for answer in client.answers]
        assert statuses == [200, 429, 200], client.api
        _, refused, retried = client.answers
        assert refused.headers["retry-after"] == "1"
        assert retried.request.headers["x-stainless-retry-count"] == "1"


async def test_tokens_of_answers_count_and_places_come_back_however_a_request_ends(serve: Serve) -> None:
    url = await serve("{use: rate-limit, by: [], tokens_per_minute: 100, concurrent_requests: 1}")
    client = Client("chat", url, max_retries=0)
    async with client.sdk:
        stream = await client.sdk.chat.completions.create(model="m", messages=HI, max_tokens=60, stream=True)
        with pytest.raises(openai.RateLimitError, match="1 concurrent requests"):
            await client.ask()
        async for _ in stream:
            pass
        with pytest.raises(openai.BadRequestError):
            await client.sdk.chat.completions.create(model="m", messages=HI, temperature=99)
        used = (await client.sdk.chat.completions.create(model="m", messages=HI, max_tokens=50)).usage
        assert used.completion_tokens == 50

        with pytest.raises(openai.RateLimitError, match="100 tokens per minute for all clients together") as refused:
            await client.ask()

    assert refused.value.response.headers["x-ratelimit-remaining-tokens"] == "0"
