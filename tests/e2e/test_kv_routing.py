"""Routing by what caches hold, between real processes over tcp: what clients gain, and what outlives a death."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.asking import dynamo

CONFIG = """
frontend: {use: openai}
router: {use: kv, seed: 1}
client: {drain_grace: 0.5, share_loads: true}
workers:
  mock:
    model: {name: mock-model}
    engine: {use: mocker, fixed_itl_ms: 5, block_size: 16, num_gpu_blocks: 4096}
    replicas: 2
    grace_period: 0.5
transport: {use: tcp}
discovery: {use: file, path: "%s", ttl: 2}
"""
#: Of byte tokens: so many whole blocks, and a little.
BLOCKS = 40

Server = Any


def prompt_of(name: object) -> str:
    """Return a prompt that begins as no other name's."""
    return f"{name}: so it goes, and goes".ljust(16 * BLOCKS + 5, "!")


def started(serve: Any, text: str, **how: Any) -> Server:
    """Return a server, once both workers are seen."""
    server = serve(text, **how)
    assert server.until(lambda: len(server.instances()) == 2, 20), server.log
    return server


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the file of the server that most tests share; each has prompts of its own."""
    return CONFIG % (tmp_path_factory.mktemp("shared") / "discovery")


@pytest.fixture(scope="module")
def shared(serve_for_module: Any, text: str) -> Server:
    return started(serve_for_module, text, env={"DYN_LOG": "debug"})


def complete(server: Server, name: object) -> int:
    """Ask, and return how many tokens of the prompt the worker had."""
    body = {"model": "mock-model", "prompt": prompt_of(name), "max_tokens": 2}
    status, _, answer = server.request("POST", "/v1/completions", body)
    assert status == 200, answer
    return (json.loads(answer)["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0


def explain(server: Server, name: object) -> list[dict[str, Any]]:
    """Return how the ranks look to a prompt."""
    status, _, answer = server.request("POST", "/route/explain", {"prompt": prompt_of(name)})
    assert status == 200, answer
    (route,) = json.loads(answer)["routes"]
    assert (route["router"], route["tokens"], route["block_size"]) == ("kv", 16 * BLOCKS + 5, 16)
    ranks: list[dict[str, Any]] = route["ranks"]
    return ranks


def holders(server: Server, name: object) -> set[str]:
    """Return the workers that hold all blocks of a prompt, as far as the frontend knows."""
    return {rank["instance_id"] for rank in explain(server, name) if rank["overlap"] == BLOCKS}


def held(server: Server, name: object) -> str:
    """Have a worker fill its cache; the one, once the frontend knows of it."""
    assert complete(server, name) == 0
    assert server.until(lambda: len(holders(server, name)) == 1, 10), explain(server, name)
    (holder,) = holders(server, name)
    return holder


def test_a_prompt_goes_back_to_the_worker_that_holds_it(shared: Server) -> None:
    holder = held(shared, "back")

    cached = [complete(shared, "back") for _ in range(6)]

    assert cached == [BLOCKS * 16] * 6
    assert holders(shared, "back") == {holder}


def test_a_restarted_frontend_soon_knows_the_cached_blocks(serve: Any, shared: Server, text: str) -> None:
    holder = held(shared, "anew")

    again = started(serve, text, command="frontend")
    # Those that come before it knows are answered as well.
    with ThreadPoolExecutor(8) as clients:
        list(clients.map(lambda number: complete(again, f"early {number}"), range(20)))

    assert again.until(lambda: holders(again, "anew") == {holder}, 10), again.log
    assert complete(again, "anew") == BLOCKS * 16


def cached_tokens(server: Server, path: str, salt: str | None) -> int:
    """Ask in one of the APIs under a salt, and return how many tokens of the prompt the worker had."""
    turn = {"role": "user", "content": prompt_of("salted")}
    body: dict[str, Any] = {"model": "mock-model", "cache_salt": salt}
    match path:
        case "/v1/completions":
            body |= {"prompt": prompt_of("salted"), "max_tokens": 2}
        case "/v1/responses":
            body |= {"input": prompt_of("salted"), "max_output_tokens": 2}
        case _:
            body |= {"messages": [turn], "max_tokens": 2}
    status, _, answer = server.request("POST", path, body)
    assert status == 200, answer
    usage = json.loads(answer)["usage"]
    if "cache_read_input_tokens" in usage:
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] > 16 * BLOCKS
        return usage["cache_read_input_tokens"]  # type: ignore[no-any-return]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return details["cached_tokens"]  # type: ignore[no-any-return]


def test_only_requests_with_one_salt_share_cached_blocks(shared: Server) -> None:
    server = shared
    chat, *others = "/v1/chat/completions", "/v1/responses", "/v1/messages"

    for salt in ("salt-of-one", "salt-of-two", None):
        assert cached_tokens(server, "/v1/completions", salt) == cached_tokens(server, chat, salt) == 0
        for path in ("/v1/completions", chat):
            # As soon as the router knows; until then a request may go to the worker that has nothing.
            assert server.until(lambda path=path, salt=salt: cached_tokens(server, path, salt) >= 16 * BLOCKS, 10)
        # What the APIs that chat ask is the same prompt.
        assert all(cached_tokens(server, path, salt) >= 16 * BLOCKS for path in others)

    overlaps = []
    for salt in ("salt-of-one", "salt-of-three"):
        body = {"prompt": prompt_of("salted"), "cache_salt": salt}
        (route,) = json.loads(server.request("POST", "/route/explain", body)[2])["routes"]
        overlaps.append(max(rank["overlap"] for rank in route["ranks"]))
    assert overlaps == [BLOCKS, 0]
    assert "salt-of" not in server.log


def test_the_command_shows_why(shared: Server) -> None:
    holder = held(shared, "why")

    shown = dynamo("route", "explain", "--url", shared.url, prompt_of("why"))

    assert shown.exit_code == 0, shown.stderr
    head, columns, *rows = shown.stdout.splitlines()
    assert head == f"aggregated workers of mock-model, chosen by kv: {16 * BLOCKS + 5} tokens, {BLOCKS} blocks of 16"
    assert columns.split()[:3] == ["WORKER", "NAME", "RANK"]
    (best,) = [row.split() for row in rows if row.startswith("*")]
    assert best[1:5] == [holder, "mock", "0", "free"]
    assert int(best[9]) == BLOCKS
    listed = json.loads(dynamo("route", "explain", "--url", shared.url, "--token-ids", "1,2,3", "--json").stdout)
    assert listed["routes"][0]["tokens"] == 3
    talk = json.dumps([{"role": "user", "content": "Hi"}])
    assert dynamo("route", "explain", "--url", shared.url, "--messages", talk).exit_code == 0
