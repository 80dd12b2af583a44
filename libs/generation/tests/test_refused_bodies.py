"""A refused body is freed at once: no error keeps it by a cycle."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from dynamo_core.errors import InvalidArgument
from dynamo_generation.requests import fields
from dynamo_generation.requests.chat import ChatRequest, parse_chat


class Body(dict[str, Any]):
    """A body that can be watched."""


def check(body: Body) -> None:
    fields.raise_found(parse_chat(body).refusal)


def check_names(body: Body) -> None:
    fields.refuse_fields(body, ChatRequest.__struct_fields__, fields.CHAT)


@pytest.mark.parametrize(
    ("check", "wrong"),
    [
        (check, {"messages": [{"role": "user"}]}),
        (check, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]}),
        (check, {"unknown": 1}),
        (check, {"audio": {"voice": "alloy"}}),
        (check_names, {"audio": {"voice": "alloy"}}),
    ],
    ids=["no content", "a picture", "an unknown field", "a passive field", "a passive field, of the names alone"],
)
def test_a_refused_body_is_freed_without_a_collection(check: Callable[[Body], None], wrong: dict[str, Any]) -> None:
    body = Body({"model": "m", "messages": [{"role": "user", "content": "x"}]} | wrong)
    watched = weakref.ref(body)
    gc.disable()
    try:
        with pytest.raises(InvalidArgument):
            check(body)
        del body
        assert watched() is None
    finally:
        gc.enable()
