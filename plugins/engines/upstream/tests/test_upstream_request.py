"""What the server is asked."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_core import BackendError, PreprocessedRequest
from dynamo_plugin_engine_upstream.request import build_request


def asked(body: Any) -> tuple[str, dict[str, Any]]:
    return build_request(PreprocessedRequest(token_ids=[1], body=body), "its-model")


def test_the_clients_fields_go_on_as_they_are_under_the_servers_name_and_always_as_a_stream() -> None:
    body = {"model": "ours", "messages": [], "tools": [{}], "temperature": 0.5, "stream": False, "custom": 1}

    path, made = asked(body)

    assert path == "chat/completions"
    assert made == body | {"model": "its-model", "stream": True, "stream_options": {"include_usage": True}}
    assert body["stream"] is False


def test_a_prompt_is_asked_as_a_completion() -> None:
    assert asked({"prompt": "x"})[0] == "completions"


def test_usage_in_every_chunk_is_asked_for_if_the_client_wants_it() -> None:
    _, made = asked({"messages": [], "stream_options": {"continuous_usage_stats": True, "include_usage": False}})

    assert made["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_extensions_of_this_framework_become_the_fields_that_servers_know() -> None:
    extension = {"top_k": 5, "ignore_eos": True, "annotations": ["timing"]}
    _, made = asked({"messages": [], "nvext": extension})
    _, greedy = asked({"messages": [], "top_p": 0.5, "nvext": {"greed_sampling": True}})

    assert (made["top_k"], made["ignore_eos"], "nvext" in made) == (5, True, False)
    assert (greedy["temperature"], "top_p" in greedy) == (0, False)


def test_a_prompt_without_the_servers_template_is_refused_by_name() -> None:
    with pytest.raises(BackendError.InvalidArgument) as caught:
        asked({"messages": [], "nvext": {"use_raw_prompt": True}})

    assert caught.value.field == "nvext.use_raw_prompt"


def test_a_request_without_a_body_is_refused() -> None:
    with pytest.raises(BackendError.InvalidArgument):
        asked(None)
