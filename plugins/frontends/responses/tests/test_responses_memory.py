"""The Responses API with a store: what is kept, and for which client; what goes on from it; a store that is missing."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
import openai
import pytest
from dynamo_core import Expected, FinishReason, HttpRoute, Principal, ResponseStoreServices
from dynamo_core.errors import CannotConnect
from dynamo_http.request_identity import PRINCIPAL
from dynamo_plugin_frontend_responses.memory_store import MemoryStore, MemoryStoreConfig
from dynamo_plugin_frontend_responses.records import NEAR
from dynamo_telemetry import Metrics

PATH = "/v1/responses"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<{{ call.id }} {{ call.function.name }}>{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FAILURES = "dynamo_frontend_response_store_failures_total"


class Watched(MemoryStore):
    """A store that tells how it was asked, and can be away, slow, or wait."""

    def __init__(self) -> None:
        super().__init__(MemoryStoreConfig(), ResponseStoreServices(Metrics()))
        self.away = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked = asyncio.Event()
        self.steps: list[int] = []
        self.written: list[dict[str, bytes]] = []

    async def put(self, owner: str, records: Mapping[str, bytes], ttl: float, expected: Expected = None) -> bool:
        self.asked.set()
        await self.gate.wait()
        if self.away:
            raise CannotConnect("the server of secret.example is away")
        self.written.append(dict(records))
        return await super().put(owner, records, ttl, expected)

    async def get(self, owner: str, keys: Sequence[str], ttl: float | None = None) -> list[bytes | None]:
        if self.away:
            raise CannotConnect("the server of secret.example is away")
        self.steps.append(len(keys))
        return await super().get(owner, keys, ttl)


@pytest.fixture
def template() -> str:
    return TEMPLATE


@pytest.fixture
def store() -> Watched:
    return Watched()


@pytest.fixture
def settings() -> dict[str, Any]:
    return {}


@pytest.fixture
def prepare(store: Watched, settings: dict[str, Any]) -> Any:
    """Have the frontend made with the store; callers are those that a header names."""

    def prepare(server: Any) -> None:
        server.response_store = store
        server.configure(**settings)
        server.body_limit = 4 * 1024 * 1024

        def protect(route: HttpRoute) -> HttpRoute:
            async def handle(http: Any) -> Any:
                key, _, tenant = http.headers.get("x-caller", "/default").partition("/")
                http[PRINCIPAL] = Principal(key_id=key, tenant=tenant)
                return await route.handler(http)

            return replace(route, handler=handle)

        server.protect = protect

    return prepare


@pytest.fixture
async def cold_server(cold_server: Any, prepare: Any) -> Any:
    prepare(cold_server)
    return cold_server


@pytest.fixture
async def server(server: Any) -> Any:
    """Yield a server whose model takes conversations of any length."""
    model = server.directory.models["m"]
    model.card = msgspec.structs.replace(model.card, context_length=None)
    return server


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": "Hi", **fields}


async def ask(server: Any, says: str = "Hello", caller: str = "/default", **fields: Any) -> dict[str, Any]:
    """Return a whole response."""
    server.directory.models["m"].says(says)
    reply = await server.post(PATH, body(**fields), x_caller=caller)
    assert reply.status == 200, reply.body
    answer: dict[str, Any] = reply.json()
    return answer


async def prompt(server: Any, **fields: Any) -> str:
    """Return what the model is shown of a request."""
    model = server.directory.models["m"]
    while not model._calls.empty():
        await model.call()
    await ask(server, **fields)
    text: str = await model.prompt()
    return text


async def http(server: Any, method: str, path: str, caller: str = "/default", **how: Any) -> tuple[int, Any]:
    """Return a request that asks no model."""
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"{server.url}{path}", headers={"x-caller": caller}, **how) as reply,
    ):
        return reply.status, await reply.json()


def events(reply: Any) -> list[dict[str, Any]]:
    """Return the data of all events."""
    return [json.loads(data) for data in re.findall(r"^data: (.*)$", reply.body.decode(), re.MULTILINE)]


def texts(items: Sequence[dict[str, Any]]) -> list[str]:
    return [item["content"][0]["text"] for item in items]


# Going on.


async def test_a_response_goes_on_from_a_stored_one_without_its_instructions(server: Any) -> None:
    first = await ask(server, input="Oslo?", instructions="Be kind.", says="Rain.")

    shown = await prompt(server, input="And Rome?", instructions="Be brief.", previous_response_id=first["id"])

    assert shown == "system: Be brief.\nuser: Oslo?\nassistant: Rain.\nuser: And Rome?\nassistant: "


async def test_responses_report_whether_they_are_stored(server: Any) -> None:
    first = await ask(server)
    second = await ask(server, previous_response_id=first["id"], store=False)

    assert (first["store"], first["previous_response_id"], first["conversation"]) == (True, None, None)
    assert (second["store"], second["previous_response_id"]) == (False, first["id"])
    assert (await http(server, "GET", f"{PATH}/{second['id']}"))[0] == 404


async def test_a_stored_response_is_shown_as_it_was_answered_until_it_is_deleted(server: Any) -> None:
    made = await ask(server, metadata={"a": "b"})
    place = f"{PATH}/{made['id']}"

    assert await http(server, "GET", place) == (200, made)
    assert await http(server, "DELETE", place) == (200, {"id": made["id"], "object": "response", "deleted": True})
    for method in ("GET", "DELETE"):
        status, error = await http(server, method, place)
        assert (status, error["error"]["message"]) == (404, f"Response with id '{made['id']}' not found.")


async def test_the_last_event_of_a_stream_comes_once_the_response_is_stored(server: Any, store: Watched) -> None:
    store.gate.clear()
    connection, call, _ = await server.begun(PATH, body(stream=True))
    call.finish(text="lo")
    await store.asked.wait()

    seen = await connection.until(b"response.output_item.done")
    assert b"response.completed" not in seen
    store.gate.set()
    rest = await connection.until(b"response.completed")
    await connection.aclose()

    (written,) = store.written
    assert b"Hello" in next(iter(written.values()))
    assert rest


async def test_a_streamed_response_can_be_continued(server: Any) -> None:
    server.directory.models["m"].says("Ra", "in.")
    reply = await server.post(PATH, body(input="Oslo?", stream=True))
    completed = [event for event in events(reply) if event["type"] == "response.completed"]
    assert [event["sequence_number"] for event in events(reply)] == list(range(len(events(reply))))
    first = completed[0]["response"]

    shown = await prompt(server, input="Rome?", previous_response_id=first["id"])

    assert shown == "user: Oslo?\nassistant: Rain.\nuser: Rome?\nassistant: "
    assert await http(server, "GET", f"{PATH}/{first['id']}") == (200, first)


async def test_a_response_that_was_cut_off_by_its_limit_is_stored_as_that(server: Any) -> None:
    server.directory.models["m"].says("Hel", reason=FinishReason.LENGTH)
    made = (await server.post(PATH, body())).json()

    assert made["status"] == "incomplete"
    assert await http(server, "GET", f"{PATH}/{made['id']}") == (200, made)


async def test_the_response_of_a_disconnected_client_is_not_stored(server: Any, store: Watched) -> None:
    connection, call, _ = await server.begun(PATH, body(stream=True))
    await connection.aclose()
    async with asyncio.timeout(10):
        await call.released.wait()
    await server.record()

    assert store.written == []


async def test_a_long_chain_is_replayed_whole_in_linear_space(server: Any, store: Watched) -> None:
    turns = 3 * NEAR + 2
    previous: dict[str, Any] = {}
    for number in range(turns):
        named = {"previous_response_id": previous["id"]} if previous else {}
        previous = await ask(server, input=f"q{number}", says=f"a{number}", max_output_tokens=2, **named)

    shown = await prompt(server, input="end", previous_response_id=previous["id"])

    assert shown == "".join(f"user: q{n}\nassistant: a{n}\n" for n in range(turns)) + "user: end\nassistant: "
    assert max(store.steps) <= NEAR
    sizes = [len(next(iter(written.values()))) for written in store.written]
    assert max(sizes) < sizes[0] + 60 * NEAR


async def test_a_chain_with_a_missing_response_cannot_be_continued(server: Any) -> None:
    first = await ask(server)
    second = await ask(server, previous_response_id=first["id"])
    await http(server, "DELETE", f"{PATH}/{first['id']}")

    reply = await server.post(PATH, body(previous_response_id=second["id"]))

    assert (reply.status, reply.json()["error"]["code"]) == (400, "previous_response_not_found")
    assert (await http(server, "GET", f"{PATH}/{second['id']}"))[0] == 200


@pytest.mark.parametrize("id", ["resp_none", "", "x" * 2000, "conv_1", "resp_ü\n", "resp_a:b"])
async def test_an_unknown_previous_response_has_the_apis_error(server: Any, id: str) -> None:
    reply = await server.post(PATH, body(previous_response_id=id))

    error = reply.json()["error"]
    assert (reply.status, error["param"], error["code"]) == (
        400,
        "previous_response_id",
        "previous_response_not_found",
    )
    assert error["message"] == f"Previous response with id '{id[:80]}' not found."


@pytest.mark.parametrize("stranger", ["one/other", "two/default", "/default", "one"])
async def test_the_responses_of_another_key_or_tenant_are_not_there(server: Any, stranger: str) -> None:
    made = await ask(server, caller="one/default")
    talk = (await http(server, "POST", "/v1/conversations", "one/default", json={}))[1]["id"]
    item = made["output"][0]["id"]

    assert (await http(server, "GET", f"{PATH}/{made['id']}", "one/default"))[0] == 200
    for method, path in (
        ("GET", f"{PATH}/{made['id']}"),
        ("DELETE", f"{PATH}/{made['id']}"),
        ("GET", f"{PATH}/{made['id']}/input_items"),
        ("POST", f"{PATH}/{made['id']}/cancel"),
        ("GET", f"/v1/conversations/{talk}"),
        ("DELETE", f"/v1/conversations/{talk}"),
        ("GET", f"/v1/conversations/{talk}/items"),
    ):
        assert (await http(server, method, path, stranger))[0] == 404, path
    for fields in (
        {"previous_response_id": made["id"]},
        {"conversation": talk},
        {"input": [{"type": "item_reference", "id": item}]},
    ):
        assert (await server.post(PATH, body(**fields), x_caller=stranger)).status in (400, 404)
    assert (await http(server, "GET", f"{PATH}/{made['id']}", "one/default"))[0] == 200


# References to items.


async def test_request_input_references_stored_items_by_id(server: Any) -> None:
    first = await ask(server, input="Oslo?", says="Rain.")
    item = first["output"][0]["id"]
    asked = (await http(server, "GET", f"{PATH}/{first['id']}/input_items"))[1]["data"][0]["id"]
    items = [{"id": asked}, {"type": "item_reference", "id": item}, {"role": "user", "content": "Rome?"}]

    assert await prompt(server, input=items) == "user: Oslo?\nassistant: Rain.\nuser: Rome?\nassistant: "


async def test_a_response_to_item_references_keeps_them_as_references(server: Any, store: Watched) -> None:
    first = await ask(server, input="Oslo?", says="x" * 500)
    named = {"type": "item_reference", "id": first["output"][0]["id"]}
    second = await ask(server, input=[named, {"role": "user", "content": "Rome?"}], says="Sun.")

    shown = await prompt(server, input="Bonn?", previous_response_id=second["id"])

    assert shown == f"assistant: {'x' * 500}\nuser: Rome?\nassistant: Sun.\nuser: Bonn?\nassistant: "
    assert b"x" * 500 not in store.written[1][second["id"]]
    listed = (await http(server, "GET", f"{PATH}/{second['id']}/input_items?order=asc"))[1]
    assert texts(listed["data"]) == ["x" * 500, "Rome?"]


async def test_items_are_named_that_a_later_response_had_named_too(server: Any) -> None:
    first = await ask(server, input="Oslo?", says="Rain.")
    named = {"type": "item_reference", "id": first["output"][0]["id"]}
    second = await ask(server, input=[named, {"role": "user", "content": "Rome?"}], says="Sun.")
    other = {"type": "item_reference", "id": second["output"][0]["id"]}
    both = [named, {"role": "user", "content": "Rome?"}, other]

    assert await prompt(server, input=both) == "assistant: Rain.\nuser: Rome?\nassistant: Sun.\nassistant: "


@pytest.mark.parametrize("id", ["msg_1", "rs_none-0", "", "msg_" + "x" * 3000, "msg_a.b-0", "resp_"])
async def test_an_unknown_item_reference_has_an_error_with_a_remedy(server: Any, id: str) -> None:
    reply = await server.post(PATH, body(input=[{"type": "item_reference", "id": id}]))

    assert reply.status == 404
    assert reply.json()["error"]["message"].startswith(f"Item with id '{id[:80]}' not found. Items are not persisted")


async def test_a_loop_of_tools_by_names_as_the_vercel_sdk_sends_it(server: Any) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    tools = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
    user = {"role": "user", "content": [{"type": "input_text", "text": "Oslo?"}]}
    first = await ask(server, input=[user], says=call, tools=tools)
    made = first["output"][0]
    items = [
        user,
        {"type": "item_reference", "id": made["id"]},
        {"type": "function_call_output", "call_id": made["call_id"], "output": "rain"},
    ]

    shown = await prompt(server, input=items, tools=tools)

    assert made["type"] == "function_call"
    assert shown == (f"user: Oslo?\nassistant: <{made['call_id']} weather>\ntool[{made['call_id']}]: rain\nassistant: ")


# Input items.


async def test_the_input_items_of_a_response_are_all_that_the_model_was_shown(server: Any) -> None:
    first = await ask(server, input="Oslo?", says="Rain.")
    second = await ask(server, input="Rome?", previous_response_id=first["id"])
    place = f"{PATH}/{second['id']}/input_items"

    newest = (await http(server, "GET", place))[1]
    oldest = (await http(server, "GET", f"{place}?order=asc&limit=2&include=message.output_text.logprobs"))[1]
    rest = (await http(server, "GET", f"{place}?order=asc&after={oldest['last_id']}"))[1]

    assert texts(newest["data"]) == ["Rome?", "Rain.", "Oslo?"]
    assert (newest["object"], newest["has_more"]) == ("list", False)
    assert (texts(oldest["data"]), oldest["has_more"]) == (["Oslo?", "Rain."], True)
    assert (texts(rest["data"]), rest["has_more"]) == (["Rome?"], False)
    assert oldest["first_id"] == oldest["data"][0]["id"] != oldest["last_id"]


@pytest.mark.parametrize(
    ("query", "param"), [("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("order=up", "order"),
                         ("after=none", "after")]
)  # fmt: skip
async def test_a_page_that_cannot_be_is_refused_by_name(server: Any, query: str, param: str) -> None:
    made = await ask(server)

    status, error = await http(server, "GET", f"{PATH}/{made['id']}/input_items?{query}")

    assert (status, error["error"]["param"]) == (400, param)


async def test_unsupported_operations_on_stored_responses_are_refused(server: Any) -> None:
    made = await ask(server)

    status, error = await http(server, "GET", f"{PATH}/{made['id']}?stream=true")
    assert (status, error["error"]["param"]) == (400, "stream")
    status, error = await http(server, "POST", f"{PATH}/{made['id']}/cancel")
    assert (status, error["error"]["message"]) == (400, "Cannot cancel a synchronous response.")
    reply = await server.post(PATH, body(background=True))
    assert (reply.status, reply.json()["error"]["param"]) == (400, "background")


# Conversations.


async def test_a_conversation_grows_with_its_responses(server: Any) -> None:
    begun = {"metadata": {"a": "b"}, "items": [{"role": "user", "content": "I am Ann."}]}
    _, talk = await http(server, "POST", "/v1/conversations", json=begun)
    first = await ask(server, input="Oslo?", says="Rain.", conversation=talk["id"])
    shown = await prompt(server, input="Rome?", says="Sun.", conversation={"id": talk["id"]})

    assert (talk["object"], talk["metadata"]) == ("conversation", {"a": "b"})
    assert first["conversation"] == {"id": talk["id"]}
    assert shown == "user: I am Ann.\nuser: Oslo?\nassistant: Rain.\nuser: Rome?\nassistant: "
    items = (await http(server, "GET", f"/v1/conversations/{talk['id']}/items?order=asc"))[1]["data"]
    assert texts(items) == ["I am Ann.", "Oslo?", "Rain.", "Rome?", "Sun."]
    listed = (await http(server, "GET", f"{PATH}/{first['id']}/input_items"))[1]["data"]
    assert texts(listed) == ["Oslo?", "I am Ann."]
    assert await prompt(server, input="?", previous_response_id=first["id"]) == (
        "user: I am Ann.\nuser: Oslo?\nassistant: Rain.\nuser: ?\nassistant: "
    )


async def test_items_of_a_conversation_are_added_shown_and_removed(server: Any) -> None:
    _, talk = await http(server, "POST", "/v1/conversations", json={})
    place = f"/v1/conversations/{talk['id']}"
    two = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]

    status, added = await http(server, "POST", f"{place}/items", json={"items": two})
    first, second = added["data"]
    assert (status, texts(added["data"])) == (200, ["one", "two"])
    assert await http(server, "GET", f"{place}/items/{second['id']}") == (200, second)
    assert await http(server, "DELETE", f"{place}/items/{first['id']}") == (200, talk)
    for method in ("GET", "DELETE"):
        assert (await http(server, method, f"{place}/items/{first['id']}"))[0] == 404
    assert (await http(server, "GET", f"{place}/items"))[1]["data"] == [second]
    assert await prompt(server, input=[{"type": "item_reference", "id": second["id"]}]) == "assistant: two\nassistant: "

    status, changed = await http(server, "POST", place, json={"metadata": {"k": "v"}})
    assert (status, changed) == (200, talk | {"metadata": {"k": "v"}})
    assert await http(server, "GET", place) == (200, changed)
    deleted = {"id": talk["id"], "object": "conversation.deleted", "deleted": True}
    assert await http(server, "DELETE", place) == (200, deleted)
    assert (await http(server, "GET", f"{place}/items"))[0] == 404
    assert (await server.post(PATH, body(conversation=talk["id"]))).status == 404


@pytest.mark.parametrize(
    ("path", "given", "param"),
    [
        ("", {"items": [{"role": "user"}]}, "items[0].content"),
        ("", {"items": [{"type": "item_reference", "id": "msg_1"}]}, "items[0].type"),
        ("", {"items": [{"role": "user", "content": "x"}] * 21}, "items"),
        ("", {"metadata": {"a": 1}}, "metadata"),
        ("", {"topic": 1}, "topic"),
        ("/conv_1", {}, "metadata"),
        ("/conv_1/items", {}, "items"),
    ],
)
async def test_a_conversation_that_cannot_be_is_refused_by_field(
    server: Any, path: str, given: Any, param: str
) -> None:
    status, error = await http(server, "POST", f"/v1/conversations{path}", json=given)

    assert (status, error["error"]["param"]) == (400, param)


async def test_previous_response_and_conversation_exclude_each_other(server: Any) -> None:
    reply = await server.post(PATH, body(previous_response_id="resp_1", conversation="conv_1"))

    assert (reply.status, reply.json()["error"]["param"]) == (400, "conversation")


async def test_input_tokens_include_the_earlier_turns(server: Any, store: Watched) -> None:
    first = await ask(server, input="Oslo?", says="Rain.")
    written = len(store.written)

    counted = [
        (await server.post(f"{PATH}/input_tokens", body(**fields))).json()["input_tokens"]
        for fields in ({}, {"previous_response_id": first["id"]})
    ]

    assert counted[1] - counted[0] == len("user: Oslo?\nassistant: Rain.\n")
    assert len(store.written) == written


# Bounds.


@pytest.mark.parametrize("settings", [{"response_store_turns": 3}])
async def test_a_conversation_with_too_many_turns_cannot_be_continued(server: Any) -> None:
    made = await ask(server)
    for _ in range(4):
        made = await ask(server, previous_response_id=made["id"])

    reply = await server.post(PATH, body(previous_response_id=made["id"]))

    assert reply.status == 400
    assert "more than 3 turns" in reply.json()["error"]["message"]


@pytest.mark.parametrize("settings", [{"response_store_context_mb": 1}])
async def test_more_than_may_be_kept_is_refused_before_a_model_is_asked(server: Any) -> None:
    model = server.directory.models["m"]
    big = "x" * 600_000
    first = await ask(server, input=big)

    for fields in ({"previous_response_id": first["id"]}, {"input": big * 2}):
        asked = model.count
        reply = await server.post(PATH, body(**{"input": big} | fields))
        assert reply.status == 400
        assert "more than 1 MB" in reply.json()["error"]["message"]
        assert model.count == asked


# Without the store.


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_that_cannot_be_stored_fails(server: Any, store: Watched, streams: bool) -> None:
    server.directory.models["m"].says("Hello")
    store.away = True

    reply = await server.post(PATH, body(stream=streams))

    if streams:
        last = events(reply)[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert "cannot be stored" in last["response"]["error"]["message"]
        assert any(event["type"] == "response.output_text.done" for event in events(reply))
        assert not any(event["type"] == "response.completed" for event in events(reply))
    else:
        error = reply.json()["error"]
        assert (reply.status, error["code"]) == (503, "response_store_unavailable")
    assert b"secret.example" not in reply.body
    assert (await server.record()).error_type == "unavailable"
    assert server.metrics.registry.get_sample_value(FAILURES, {"operation": "put"}) == 1


@pytest.mark.parametrize("settings", [{"response_store_policy": "pass"}])
@pytest.mark.parametrize("streams", [False, True])
async def test_an_unstorable_answer_reports_store_false_if_allowed(
    server: Any, store: Watched, streams: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server.directory.models["m"].says("Hello")
    store.away = True

    reply = await server.post(PATH, body(stream=streams))

    response = events(reply)[-1]["response"] if streams else reply.json()
    assert (reply.status, response["status"], response["store"]) == (200, "completed", False)
    assert response["output"][0]["content"][0]["text"] == "Hello"
    assert (await server.record()).error_type == ""
    assert server.metrics.registry.get_sample_value(FAILURES, {"operation": "pass"}) == 1
    assert "goes out without being stored" in caplog.text


@pytest.mark.parametrize("settings", [{"response_store_policy": "pass"}])
async def test_an_unreadable_store_is_an_error_with_any_policy(server: Any, store: Watched) -> None:
    made = await ask(server)
    store.away = True

    reply = await server.post(PATH, body(previous_response_id=made["id"]))

    assert (reply.status, reply.json()["error"]["code"]) == (503, "response_store_unavailable")
    assert (await http(server, "GET", f"{PATH}/{made['id']}"))[0] == 503
    assert (await ask(server, store=False))["store"] is False


@pytest.mark.parametrize("settings", [{"response_store_timeout": 0.05}])
async def test_a_store_that_does_not_answer_is_given_up(server: Any, store: Watched) -> None:
    server.directory.models["m"].says("Hello")
    store.gate.clear()

    reply = await server.post(PATH, body())

    assert reply.status == 503


async def test_a_record_that_cannot_be_read_is_as_good_as_not_there(server: Any, store: Watched) -> None:
    made = await ask(server)
    for bad in (b"", b"{", b"[]", b'{"response": 1}', json.dumps({"response": {}}).encode()):
        await store.put("/default", {made["id"]: bad}, 60)
        assert (await http(server, "GET", f"{PATH}/{made['id']}"))[0] == 404


class TestWithoutAStore:
    """Nothing is kept, and errors tell what to set."""

    @pytest.fixture
    def prepare(self) -> Any:
        return lambda server: None

    async def test_stateful_requests_without_a_store_name_the_setting(self, server: Any) -> None:
        for fields in (
            {"previous_response_id": "resp_1"},
            {"conversation": "conv_1"},
            {"input": [{"type": "item_reference", "id": "msg_1"}]},
        ):
            reply = await server.post(PATH, body(**fields))
            assert reply.status == 400
            assert "`frontend.response_store`" in reply.json()["error"]["message"]

    async def test_responses_without_a_store_report_store_false(self, server: Any) -> None:
        made = await ask(server, store=True)

        assert made["store"] is False
        assert "conversation" not in made
        assert (await http(server, "GET", f"{PATH}/{made['id']}"))[0] == 404


# As the official client asks.


async def test_the_official_client_goes_on_lists_and_deletes(server: Any) -> None:
    server.directory.models["m"].says("Rain.")
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
        first = await client.responses.create(model="m", input="Oslo?")
        second = await client.responses.create(model="m", input="Rome?", previous_response_id=first.id)
        found = await client.responses.retrieve(second.id)
        items = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=1)]
        talk = await client.conversations.create(items=[{"role": "user", "content": "I am Ann."}])
        third = await client.responses.create(model="m", input="Bonn?", conversation=talk.id)
        told = [item async for item in client.conversations.items.list(talk.id, order="asc")]
        await client.conversations.items.delete(told[0].id or "", conversation_id=talk.id)
        deleted = await client.conversations.delete(talk.id)
        await client.responses.delete(first.id)

        assert (found.output_text, found.previous_response_id) == ("Rain.", first.id)
        assert [item.type for item in items] == ["message"] * 3
        assert third.conversation is not None
        assert third.conversation.id == talk.id
        assert [item.type for item in told] == ["message"] * 3
        assert deleted.deleted
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError):
            await client.responses.cancel(second.id)
