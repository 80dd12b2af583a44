"""One row of the table of errors decides what every HTTP door says: here through real listeners, error by error."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import aiohttp
import pytest
from dynamo_core import FrontendServices, HttpFault, Problem, Thresholds, errors
from dynamo_core.errors import HTTP_ROWS, InvalidArgument, problem_of
from dynamo_http import Listener, metrics_route
from dynamo_http.health import health_routes, system_routes
from dynamo_plugin_frontend_anthropic.frontend import AnthropicFrontend
from dynamo_plugin_frontend_ollama.frontend import OllamaFrontend
from dynamo_plugin_frontend_openai.frontend import OpenAIFrontend
from dynamo_plugin_frontend_responses.frontend import ResponsesFrontend
from dynamo_plugin_router_slot_tracker.service import Service, ServiceSettings
from dynamo_runtime.assembly.api_set import api_set
from dynamo_runtime.telemetry.request_accounting import RequestTracker
from dynamo_telemetry import Metrics

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
ADDED = {"model_name": "m", "request_id": "r", "worker_id": 1, "dp_rank": 0, "sequence_hashes": []}

Message = Callable[[dict[str, Any]], str]
Door = tuple[str, str, dict[str, Any] | None, Message]
Answered = tuple[str, aiohttp.ClientResponse, Message]


def flat(body: dict[str, Any]) -> str:
    assert set(body) == {"error", "message", "type", "code"}
    assert body["error"]["message"] == body["message"]
    return str(body["message"])


def nested(body: dict[str, Any]) -> str:
    assert body["type"] == "error"
    return str(body["error"]["message"])


def plain(body: dict[str, Any]) -> str:
    assert set(body) == {"error"}
    return str(body["error"])


def named(body: dict[str, Any]) -> str:
    """Return the named field, of an API whose messages name it."""
    return plain(body)


def anthropic(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a problem as the Anthropic API names them."""
    names = {f"x-ratelimit-{what}-requests": f"anthropic-ratelimit-requests-{what}" for what in ("limit", "remaining")}
    return {names.get(name, name): value for name, value in headers.items()}


#: Routes of a frontend process, and how each words an error.
CLIENTS: list[Door] = [
    ("POST", "/v1/chat/completions", CHAT, flat),
    ("POST", "/v1/chat/completions", {**CHAT, "stream": True}, flat),
    ("POST", "/v1/completions", {"model": "m", "prompt": "Hi"}, flat),
    ("POST", "/v1/embeddings", {"model": "m", "input": "Hi"}, flat),
    ("POST", "/v1/rerank", {"model": "m", "query": "Hi", "documents": ["Ho"]}, flat),
    ("POST", "/v1/responses", {"model": "m", "input": "Hi"}, flat),
    ("POST", "/v1/messages", {**CHAT, "max_tokens": 5}, nested),
    ("POST", "/v1/messages/count_tokens", CHAT, nested),
    ("POST", "/tokenize", {"model": "m", "prompt": "Hi"}, flat),
    ("POST", "/detokenize", {"model": "m", "tokens": [1]}, flat),
    ("POST", "/api/chat", CHAT, named),
    ("POST", "/api/generate", {"model": "m", "prompt": "Hi", "stream": False}, named),
    ("POST", "/api/embed", {"model": "m", "input": "Hi"}, named),
    ("POST", "/api/show", {"model": "m"}, named),
    ("GET", "/api/tags", None, named),
    ("GET", "/v1/models", None, flat),
    ("GET", "/dynamo/alpha/list-models", None, flat),
]
OPERATORS: list[Door] = [
    ("POST", "/route/explain", {"model": "m", "prompt": "Hi"}, flat),
    ("GET", "/busy_threshold", None, plain),
    ("POST", "/busy_threshold", {"model": "m", "active_decode_blocks_threshold": 0.5}, plain),
]
#: Routes of core in every process, as core's listeners have them.
HEALTH: list[Door] = [("GET", "/health", None, flat), ("GET", "/ready", None, flat), ("GET", "/metrics", None, flat)]
SYSTEM: list[Door] = [("GET", "/health", None, flat), ("GET", "/live", None, flat), ("GET", "/ready", None, flat)]
TRACKER: list[Door] = [
    ("GET", "/workers", None, plain),
    ("GET", "/loads", None, plain),
    ("POST", "/add", ADDED, plain),
    ("POST", "/potential_loads", {"model_name": "m", "sequence_hashes": []}, plain),
]


class House:
    """Every door, over parts that fail with `error`."""

    def __init__(self) -> None:
        self.error: BaseException = RuntimeError("not set")
        self.listeners: list[tuple[Listener, list[Door]]] = []

    def fail(self, *_: Any, **__: Any) -> NoReturn:
        raise self.error

    async def fail_later(self) -> NoReturn:
        raise self.error

    async def answers(
        self, client: aiohttp.ClientSession
    ) -> AsyncIterator[tuple[str, aiohttp.ClientResponse, Message]]:
        """Yield what each door answers."""
        for listener, doors in self.listeners:
            for method, path, body, message in doors:
                async with client.request(method, listener.url + path, json=body) as answer:
                    yield f"{listener.name}: {method} {path}", answer, message


class Broken:
    """A part of a process of which every use fails, but that of the values given."""

    def __init__(self, house: House, **values: Any) -> None:
        self._house = house
        self.__dict__ |= values

    def __getattr__(self, name: str) -> Any:
        return self._house.fail


class BrokenModel:
    """A model of which no more than the name can be had."""

    name = "m"

    def __init__(self, house: House) -> None:
        self._house = house

    def __getattr__(self, name: str) -> Any:
        self._house.fail()


class Control:
    """Thresholds that are in use."""

    armed = True

    def changed_models(self) -> list[str]:
        return []

    def of(self, model: str) -> Thresholds:
        return Thresholds()


@asynccontextmanager
async def house(overload_status: int = 503, *, starting: bool = False) -> AsyncIterator[House]:
    made = House()
    metrics = Metrics()
    services = FrontendServices(
        models=Broken(made, get=lambda _: BrokenModel(made)),
        requests=RequestTracker(metrics, lambda _: None),
        metrics=metrics,
        write_stall=5.0,
        keep_alive=5.0,
        thresholds=Control(),  # type: ignore[arg-type]
        overload_status=overload_status,
    )
    apis = api_set({api.NAME: api for api in (OpenAIFrontend, ResponsesFrontend, AnthropicFrontend, OllamaFrontend)})
    frontend = apis(apis.Config(), services)
    source: Any = Broken(made, shutting_down=False, starting=False)
    tracker = Service(ServiceSettings(host="127.0.0.1", port=0))
    # It has no such setting.
    tracker_doors = TRACKER if overload_status == 503 else []
    for name in ("workers", "loads", "add", "potential_loads"):
        setattr(tracker.registry, name, made.fail)
    listeners = [
        ("frontend", list(frontend.routes()), [*CLIENTS, *OPERATORS]),
        ("health", [*health_routes(source), metrics_route(made.fail_later)], HEALTH),
        ("system", [*system_routes(source), metrics_route(made.fail_later)], SYSTEM),
    ]
    for name, routes, doors in listeners:
        listener = Listener(
            name,
            host="127.0.0.1",
            port=0,
            routes=routes,
            body_limit=10_000,
            max_connections=100,
            idle_timeout=75.0,
            overload_status=overload_status,
        )
        await listener.start(starting=starting)
        made.listeners.append((listener, doors))
    await tracker.start()
    opened = [listener for listener, _ in made.listeners]
    made.listeners.append((tracker.listener, tracker_doors))
    try:
        yield made
    finally:
        await tracker.aclose()
        for listener in opened:
            await listener.aclose()
        await frontend.aclose()


def every_error() -> Iterator[BaseException]:
    """Yield one of each class of the tree, and those of other origin that the table names or leaves to its last row."""
    for cls in sorted(set(errors._BY_KIND.values()), key=lambda cls: cls.kind):
        yield cls("told")
    yield from (HttpFault(418, "told"), TimeoutError("told"), ValueError("told"))


async def check(made: House, client: aiohttp.ClientSession, error: BaseException, problem: Problem) -> None:
    made.error = error
    seen = 0
    async for door, answer, message in made.answers(client):
        where = f"{type(error).__name__} at {door}"
        assert answer.status == problem.status, where
        assert answer.headers.get("Retry-After") == (problem.retry_after and str(problem.retry_after)), where
        told = problem.headers if message is not nested else anthropic(problem.headers)
        assert {name: answer.headers.get(name) for name in told} == told, where
        body = await answer.json()
        if message in (nested, named) and problem.param is not None:
            assert message(body) == f"{problem.param}: {problem.message}", where
        else:
            assert message(body) == problem.message, where
        if message is flat:
            assert (body["code"], body["error"]["param"]) == (problem.status, problem.param), where
            kind = problem.type or errors.error_type(problem.status)
            assert (body["type"], body["error"]["code"]) == (kind, problem.code), where
        seen += 1
    assert seen == sum(len(doors) for _, doors in made.listeners)


async def test_every_api_answers_every_error_as_in_the_table() -> None:
    async with house() as made, aiohttp.ClientSession() as client:
        for error in every_error():
            await check(made, client, error, problem_of(error))


async def test_the_status_of_an_error_is_changed_at_every_door_by_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = HTTP_ROWS[InvalidArgument]._replace(status=422, retry_after=7)

    async with house() as made, aiohttp.ClientSession() as client:
        monkeypatch.setitem(HTTP_ROWS, InvalidArgument, changed)

        await check(made, client, InvalidArgument("told", field="f"), Problem(422, "told", param="f", retry_after=7))


async def test_the_status_of_overload_and_the_bounds_of_the_wait_hold_at_every_door() -> None:
    async with house(overload_status=529) as made, aiohttp.ClientSession() as client:
        for error, seconds in (
            (errors.ServiceOverloaded(retry_after=500.0), 60),
            (errors.ServiceOverloaded(retry_after=1.2), 2),
            (errors.WorkerOverloaded("10.0.0.1 is full"), 1),
        ):
            problem = problem_of(error, 529)
            assert (problem.status, problem.retry_after) == (529, seconds)
            await check(made, client, error, problem)


async def test_refusals_of_a_client_carry_their_words_and_headers_at_every_door() -> None:
    limits = {"limit-requests": "60", "remaining-requests": "0"}

    async with house() as made, aiohttp.ClientSession() as client:
        for error in (
            errors.RateLimited("60 a minute", retry_after=500.0, limits=limits),
            errors.QuotaExceeded("spent"),
        ):
            problem = problem_of(error, 529)
            assert problem.status == 429
            assert problem.headers
            await check(made, client, error, problem)


async def test_a_starting_process_is_reported_in_each_apis_form() -> None:
    async with house(starting=True) as made, aiohttp.ClientSession() as client:
        del made.listeners[1:]
        problem = problem_of(errors.Unavailable("The service is starting, please retry later"))

        await check(made, client, ValueError("the model was asked"), problem)
