"""``POST /route/explain``: what operators are told of where a prompt would go."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_core import ListenerName
from dynamo_core.contracts.requests.explain import RankView, RouteView

Server = Any

PATH = "/route/explain"
CONVERSATION = [{"role": "user", "content": "Hi"}]


async def test_the_explanation_lists_ranks_by_role(server: Server) -> None:
    rank = RankView(7, "mock", 0, "free", 2, 30, 5, overlap=1, shared=0, cost=2.5, best=True)
    model = server.add_model()
    model.views = [RouteView("aggregated", "kv", 2, 16, [rank])]

    reply = await server.post(PATH, {"model": "m", "prompt": "Hi"})

    assert reply.status == 200
    assert reply.json() == {
        "model": "m",
        "routes": [
            {
                "role": "aggregated",
                "router": "kv",
                "tokens": 2,
                "block_size": 16,
                "refusal": None,
                "ranks": [
                    {
                        "instance_id": "0000000000000007",
                        "worker": "mock",
                        "dp_rank": 0,
                        "state": "free",
                        "requests": 2,
                        "prefill_tokens": 30,
                        "blocks": 5,
                        "overlap": 1,
                        "shared": 0,
                        "cost": 2.5,
                        "best": True,
                    }
                ],
            }
        ],
    }
    assert model.count == 0
    assert server.records == []


@pytest.mark.parametrize(
    "named", [{"nvext": {"session_id": "s"}}, {"prompt_cache_key": "s"}], ids=lambda named: next(iter(named))
)
async def test_the_router_gets_the_session_of_the_body(server: Server, named: dict[str, Any]) -> None:
    model = server.add_model()

    await server.post(PATH, {"model": "m", "prompt": "Hi", **named})
    await server.post(PATH, {"model": "m", "messages": CONVERSATION, **named})

    assert [principal.session for principal in model.explained_to] == ["s", "s"]


@pytest.mark.parametrize(
    ("asked", "endpoint", "body"),
    [
        ({"prompt": "Hello there"}, "/v1/completions", {"prompt": "Hello there"}),
        ({"token_ids": [1, 2, 3]}, "/v1/completions", {"prompt": [1, 2, 3]}),
        ({"prompt": [4, 5]}, "/v1/completions", {"prompt": [4, 5]}),
        ({"messages": CONVERSATION}, "/v1/chat/completions", {"messages": CONVERSATION}),
        ({"prompt": "x", "cache_salt": "s"}, "/v1/completions", {"prompt": "x", "cache_salt": "s"}),
    ],
)
async def test_a_prompt_is_looked_at_as_an_engine_would_be_given_it(
    server: Server, asked: dict[str, Any], endpoint: str, body: dict[str, Any]
) -> None:
    model = server.add_model()
    model.script = lambda call: call.finish()
    assert (await server.post(PATH, asked)).status == 200
    assert (await server.post(endpoint, {"model": "m", **body})).status == 200

    (explained,), given = model.explained, (await model.call()).request

    assert explained.token_ids == given.token_ids
    assert explained.routing == given.routing


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({}, 400, "prompt"),
        ({"prompt": "Hi", "messages": CONVERSATION}, 400, "prompt"),
        ({"prompt": "Hi", "token_ids": [1]}, 400, "prompt"),
        ({"prompt": ["Hi", "Ho"]}, 400, "prompt"),
        ({"token_ids": "1,2"}, 400, "token_ids"),
        ({"token_ids": [1, True]}, 400, "token_ids"),
        ({"token_ids": [999_999]}, 400, "prompt"),
        ({"token_ids": []}, 400, "prompt"),
        ({"token_ids": [-1]}, 400, "prompt"),
        ({"prompt": "Hi" * 100_000}, 400, "prompt"),
        ({"messages": "Hi"}, 400, "messages"),
        ({"prompt": "Hi", "temprature": 1}, 400, "temprature"),
        ({"prompt": "Hi", "model": "other"}, 404, "model"),
        ({"prompt": "Hi", "model": 7}, 404, "model"),
        ([1], 400, None),
    ],
)
async def test_unexplainable_requests_are_refused_with_their_field(
    server: Server, body: Any, status: int, field: str | None
) -> None:
    model = server.add_model()

    reply = await server.post(PATH, body)

    assert (reply.status, reply.json()["error"]["param"]) == (status, field)
    assert model.explained == []


async def test_a_model_must_be_named_where_there_are_several(server: Server) -> None:
    server.directory.models.clear()
    assert (await server.post(PATH, {"prompt": "Hi"})).status == 503
    server.add_model()
    assert (await server.post(PATH, {"prompt": "Hi"})).status == 200
    server.add_model("other")
    assert (await server.post(PATH, {"prompt": "Hi"})).status == 400
    assert (await server.post(PATH, {"prompt": "Hi", "model": "other"})).status == 200


@pytest.mark.parametrize("disabled", [False, True])
async def test_route_explain_is_an_operators_route_and_can_be_disabled(cold_server: Server, disabled: bool) -> None:
    cold_server.configure(disable_admin_api=disabled)
    await cold_server.start()

    assert cold_server.frontend is not None
    listeners = {route.path: route.listener for route in cold_server.frontend.routes()}
    assert listeners.get(PATH) == (None if disabled else ListenerName.ADMIN)
