"""A request names its user and its session: what plugins see of that, what leaves the process, and what is logged.

The plugins are an installed distribution of the test's own, in a whole application behind real HTTP.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from dynamo_core import QuotaExceeded, RateLimited
from dynamo_http.auth import hash_of, new_key

KEY = new_key()
MODULE = "dynamo_test_noting"
PLUGIN = """
from dynamo_core import Admission, EngineConfig, LLMEngine, LLMEngineOutput, Permit, Route, Router, hookimpl

DYNAMO_API = 1
seen = {"router": [], "precheck": [], "admit": [], "engine": [], "record": []}
refusals = {}


class NotingRouter(Router):
    NAME = "noting"

    async def route(self, request, pool):
        seen["router"].append(request.principal)
        return Route(pool.eligible(request.excluded)[0])


class NotingAdmission(Admission):
    NAME = "noting"

    def precheck(self, model, principal, pools):
        seen["precheck"].append(principal)
        if principal.user in refusals:
            raise refusals[principal.user]

    async def admit(self, request, principal, pools):
        seen["admit"].append(principal)
        return Permit()


class NotingEngine(LLMEngine):
    NAME = "noting"

    async def start(self, worker_id):
        return EngineConfig(model=self.worker.model_name)

    async def generate(self, request, ctx):
        seen["engine"].append(request)
        yield LLMEngineOutput(token_ids=[72])
        yield LLMEngineOutput.stop()

    async def cleanup(self):
        pass


@hookimpl
def dynamo_register_routers():
    return [NotingRouter]


@hookimpl
def dynamo_register_admission():
    return [NotingAdmission]


@hookimpl
def dynamo_register_engines():
    return [NotingEngine]


@hookimpl
def dynamo_request_finished(record):
    seen["record"].append(record)
"""
CONFIG = f"""
frontend: {{port: 0}}
admin: {{port: 0}}
router: {{use: noting}}
admission: {{use: noting}}
auth: {{keys: [{{id: team, hash: "{hash_of(KEY)}", tenant: blue}}]}}
workers: {{w: {{model: {{name: m}}, engine: {{use: noting}}, grace_period: 0}}}}
"""
NAMED = "session_header: X-Session, forward_headers: [X-Team, x-absent]"
HEADERS = {"x-session": "dark-room", "x-team": "purple-team"}
#: What no line of the log may hold.
SAID = ("mallory", *HEADERS.values(), "x-team")

Serve = Callable[[str], Awaitable[str]]
HI: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module of the plugins, installed."""
    (tmp_path / f"{MODULE}.py").write_text(PLUGIN)
    info = tmp_path / f"{MODULE}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {MODULE}\nVersion: 1\n")
    kinds = ("router", "admission", "engine")
    (info / "entry_points.txt").write_text("[dynamo]\n" + "".join(f"{kind}-noting = {MODULE}\n" for kind in kinds))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield __import__(MODULE)
    del sys.modules[MODULE]


@pytest.fixture
def serve(noted: Any, serve_config: Serve, caplog: pytest.LogCaptureFixture) -> Serve:
    """Serve the config with this `http` section; give the address."""
    caplog.set_level(logging.DEBUG)
    return lambda http: serve_config(f"{CONFIG}http: {{{http}}}\n")


def client(url: str, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, **options)


async def test_router_admission_and_record_see_user_session_tenant_and_headers(
    serve: Serve, noted: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with client(await serve(NAMED)) as sdk:
        answer = await sdk.chat.completions.create(model="m", messages=HI, user="mallory", extra_headers=HEADERS)

    assert answer.choices[0].message.content == "H"
    for place in ("precheck", "admit", "router"):
        (principal,) = noted.seen[place]
        assert (principal.key_id, principal.tenant) == ("team", "blue"), place
        assert (principal.user, principal.session) == ("mallory", "dark-room"), place
        assert principal.headers == {"x-team": "purple-team"}, place
    (record,) = noted.seen["record"]
    assert (record.tenant, record.user, record.session) == ("blue", "mallory", "dark-room")
    (line,) = [line for line in caplog.records if line.name == "dynamo.access"]
    assert vars(line)["fields"]["tenant"] == "blue"
    shown = caplog.text + "".join(str(vars(line)) for line in caplog.records)
    assert [word for word in SAID if word in shown] == []


async def test_identity_is_not_sent_to_workers_by_default(serve: Serve, noted: Any) -> None:
    async with client(await serve(NAMED)) as sdk:
        await sdk.chat.completions.create(model="m", messages=HI, user="mallory", extra_headers=HEADERS)

    (request,) = noted.seen["engine"]
    assert request.routing is None


async def test_identity_is_sent_to_workers_if_configured(serve: Serve, noted: Any) -> None:
    async with client(await serve(f"{NAMED}, forward_identity: true")) as sdk:
        await sdk.completions.create(model="m", prompt="Hi", user="mallory", extra_headers=HEADERS)

    hints = noted.seen["engine"][0].routing
    assert (hints.tenant, hints.user, hints.session_id) == ("blue", "mallory", "dark-room")
    assert hints.headers == {"x-team": "purple-team"}


async def test_unnamed_headers_reach_no_plugin(serve: Serve, noted: Any) -> None:
    async with client(await serve("")) as sdk:
        await sdk.chat.completions.create(model="m", messages=HI, extra_headers=HEADERS)

    (principal,) = noted.seen["router"]
    assert (principal.user, principal.session, principal.headers) == ("", "", {})


async def test_the_clients_own_routing_hint_goes_to_its_worker_always(serve: Serve, noted: Any) -> None:
    async with client(await serve("")) as sdk:
        await sdk.chat.completions.create(model="m", messages=HI, extra_body={"nvext": {"session_id": "s-1"}})

    assert noted.seen["router"][0].session == "s-1"
    assert noted.seen["engine"][0].routing.session_id == "s-1"
    assert noted.seen["engine"][0].routing.tenant is None


async def test_official_sdks_raise_a_rate_limit_error_in_every_api(serve: Serve, noted: Any) -> None:
    url = await serve(NAMED)
    limits = {"limit-requests": "60", "remaining-requests": "0", "reset-requests": "6m0s"}
    noted.refusals["mallory"] = RateLimited("Only 60 a minute", retry_after=30, limits=limits)
    noted.refusals["eve"] = QuotaExceeded("The budget is spent")

    async with client(url, max_retries=0) as sdk:
        for ask in (
            sdk.chat.completions.create(model="m", messages=HI, user="mallory"),
            sdk.completions.create(model="m", prompt="Hi", user="mallory"),
            sdk.responses.create(model="m", input="Hi", safety_identifier="mallory"),
        ):
            with pytest.raises(openai.RateLimitError, match="Only 60 a minute") as refused:
                await ask
            assert refused.value.code == "rate_limit_exceeded"
            assert refused.value.response.headers["retry-after"] == "30"
            assert refused.value.response.headers["x-ratelimit-reset-requests"] == "6m0s"
    async with anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0) as claude:
        with pytest.raises(anthropic.RateLimitError, match="Only 60 a minute") as limited:
            await claude.messages.create(model="m", max_tokens=5, messages=HI, metadata={"user_id": "mallory"})
        assert limited.value.response.json()["error"]["type"] == "rate_limit_error"
        assert limited.value.response.headers["retry-after"] == "30"
        assert limited.value.response.headers["anthropic-ratelimit-requests-remaining"] == "0"
    # With the retries that the SDK does by itself.
    noted.seen["precheck"].clear()
    async with client(url) as sdk:
        with pytest.raises(openai.RateLimitError, match="The budget is spent") as spent:
            await sdk.chat.completions.create(model="m", messages=HI, user="eve")
    assert (spent.value.code, spent.value.type) == ("insufficient_quota", "insufficient_quota")
    assert len(noted.seen["precheck"]) == 1
    assert [record.error_type for record in noted.seen["record"]] == ["rate_limited"] * 4 + ["quota_exceeded"]
