"""Each API names the end user and the session in fields of its own; admission sees both, and records hold them."""

from __future__ import annotations

import string
from typing import Any

import msgspec
import pytest
from dynamo_core import EMBED, Principal
from dynamo_core.errors import QuotaExceeded, RateLimited
from dynamo_generation.requests import end_user
from hypothesis import given
from hypothesis import strategies as st

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"model": "m", "messages": MESSAGES}
TEXT: dict[str, Any] = {"model": "m", "prompt": "Hi"}
INPUT: dict[str, Any] = {"model": "m", "input": "Hi"}

#: Path, body, and the user and the session that it names.
NAMED = [
    ("/v1/chat/completions", CHAT | {"user": "u"}, "u", ""),
    ("/v1/chat/completions", CHAT | {"user": "u", "safety_identifier": "s"}, "s", ""),
    ("/v1/chat/completions", CHAT | {"nvext": {"session_id": "n"}, "prompt_cache_key": "k"}, "", "n"),
    ("/v1/chat/completions", CHAT | {"prompt_cache_key": "k"}, "", "k"),
    ("/v1/chat/completions", CHAT | {"user": None, "nvext": None, "prompt_cache_key": ""}, "", ""),
    ("/v1/completions", TEXT | {"user": "u", "nvext": {"session_id": "n"}}, "u", "n"),
    ("/v1/completions", TEXT | {"prompt_cache_key": "k"}, "", "k"),
    ("/v1/embeddings", INPUT | {"user": "u"}, "u", ""),
    ("/v1/responses", INPUT | {"safety_identifier": "s", "prompt_cache_key": "k"}, "s", "k"),
    ("/v1/messages", CHAT | {"max_tokens": 5, "metadata": {"user_id": "u"}}, "u", ""),
    ("/v1/messages", CHAT | {"max_tokens": 5}, "", ""),
]


@pytest.mark.parametrize(("path", "body", "user", "session"), NAMED)
async def test_admission_and_record_get_the_user_and_session_of_the_body(
    server: Any, model: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], user: str, session: str
) -> None:
    model.script = lambda call: call.finish(text="x")
    model.card = msgspec.structs.replace(
        model.card, model_types=["chat", "completions", "embeddings"], capabilities=[EMBED]
    )
    seen: list[Principal] = []
    monkeypatch.setattr(model, "precheck", seen.append)

    reply = await server.post(path, body)
    record = await server.record()

    assert reply.status == 200, reply.body
    assert [(principal.user, principal.session) for principal in seen] == [(user, session)]
    assert (record.user, record.session, record.tenant) == (user, session, "default")


async def test_the_conversation_of_a_refused_response_is_the_session_of_its_record(server: Any, model: Any) -> None:
    for conversation in ("conv_1", {"id": "conv_1"}):
        reply = await server.post("/v1/responses", INPUT | {"conversation": conversation, "prompt_cache_key": "k"})
        record = await server.record()

        assert reply.status == 400
        assert (record.session, record.error_type) == ("conv_1", "validation")


@pytest.mark.parametrize("session", ["x" * 257, "a\nb", "\x7f"])
async def test_a_session_that_cannot_be_one_is_refused_by_the_name_of_its_field(
    server: Any, model: Any, session: str
) -> None:
    reply = await server.chat(nvext={"session_id": session})

    assert reply.status == 400
    assert reply.json()["error"]["param"] == "nvext.session_id"
    assert "`nvext.session_id` must" in reply.json()["message"]
    assert model.count == 0


def test_the_session_of_a_header_goes_before_those_of_the_body() -> None:
    known = Principal(session="header")

    assert end_user.with_end_user(known, {"prompt_cache_key": "\n"}, end_user.USER, end_user.SESSION) is known


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(string.ascii_letters, max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["id", "session_id"]), inner),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(["user", "nvext", "prompt_cache_key", "conversation", "metadata"]), JSON))
def test_a_body_of_wrong_types_names_nothing_and_breaks_nothing(raw: dict[str, Any]) -> None:
    found = end_user.with_end_user(Principal(), raw, end_user.USER, (*end_user.SESSION, *end_user.RESPONSES_SESSION))

    texts = [value for value in raw.values() if isinstance(value, str)]
    texts += [each for value in raw.values() if isinstance(value, dict) for each in value.values()]
    assert found.user == (raw["user"] if isinstance(raw.get("user"), str) else "")
    assert not found.session or found.session in texts


@pytest.mark.parametrize("headers", [{}, {"origin": "https://a.example"}])
async def test_limit_headers_are_on_raw_and_ordinary_responses(
    server: Any, model: Any, headers: dict[str, str]
) -> None:
    model.precheck_refusal = RateLimited("60 a minute", retry_after=9, limits={"limit-tokens": "5"})

    reply = await server.post("/v1/chat/completions", CHAT, **headers)

    assert (reply.status, reply.whole) == (429, True)
    assert reply.json()["message"] == "60 a minute"
    assert reply.headers["content-type"].startswith("application/json")
    assert (reply.headers["retry-after"], reply.headers["x-ratelimit-limit-tokens"]) == ("9", "5")


@pytest.mark.parametrize("headers", [{}, {"origin": "https://a.example"}])
async def test_quota_headers_are_on_raw_and_ordinary_responses(
    server: Any, model: Any, headers: dict[str, str]
) -> None:
    model.precheck_refusal = QuotaExceeded("spent")

    reply = await server.post("/v1/messages", CHAT | {"max_tokens": 5}, **headers)

    assert (reply.status, reply.headers["x-should-retry"]) == (429, "false")
    assert "retry-after" not in reply.headers
    assert reply.json() == {"type": "error", "error": {"type": "rate_limit_error", "message": "spent"}}


@pytest.mark.parametrize("span", ["1h2m3.5s", "6m0s", "20ms", "90s"])
async def test_the_anthropic_api_reports_the_time_of_a_limit_reset(server: Any, model: Any, span: str) -> None:
    limits = {"reset-tokens": span, "limit-requests": "60"}
    model.precheck_refusal = RateLimited("slow down", limits=limits)

    reply = await server.post("/v1/messages", CHAT | {"max_tokens": 5})

    assert reply.headers["anthropic-ratelimit-requests-limit"] == "60"
    moment = reply.headers["anthropic-ratelimit-tokens-reset"]
    assert moment[10] + moment[-1] == "TZ"
    assert not any(name.startswith("x-ratelimit") for name in reply.headers)


@pytest.mark.parametrize("span", ["", "soon", "5", "-1s"])
async def test_an_unparsable_reset_is_left_out_of_the_anthropic_headers(server: Any, model: Any, span: str) -> None:
    model.precheck_refusal = RateLimited("slow down", limits={"reset-tokens": span})

    reply = await server.post("/v1/messages", CHAT | {"max_tokens": 5})

    assert reply.status == 429
    assert not any("reset" in name for name in reply.headers)
