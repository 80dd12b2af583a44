"""A field that is given twice is refused by its name, in every route that asks a model; inner objects may be odd."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dynamo_generation.bodies.duplicates import find_duplicate
from hypothesis import given
from hypothesis import strategies as st

#: Names and texts that look like structure.
ODD = st.sampled_from(["a", "b", "", '"', "\\", '\\"', "a\\", "{", "}", "[", "]", ":", ",", '":', "é", "\n"])
VALUES = st.recursive(
    st.none() | st.integers() | ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ODD, inner, max_size=3),
    max_leaves=8,
)
SPACES = st.sampled_from(["", " ", "\n\t"])


def written(pairs: list[tuple[str, Any]], space: str, ascii: bool) -> bytes:
    """Return an object of these fields, which may be there twice."""
    fields = [
        f"{json.dumps(name, ensure_ascii=ascii)}{space}:{space}{json.dumps(value, ensure_ascii=ascii)}"
        for name, value in pairs
    ]
    return (space + "{" + space + f"{space},".join(fields) + space + "}" + space).encode()


@given(st.lists(st.tuples(ODD, VALUES), max_size=6), SPACES, st.booleans(), st.sampled_from([0, 3000]))
def test_exactly_the_duplicate_field_is_found(pairs: list[tuple[str, Any]], space: str, ascii: bool, more: int) -> None:
    body = written(pairs, space, ascii) + b" " * more
    names = [name for name, _ in pairs]

    found = find_duplicate(body, json.loads(body))

    assert found == next((name for index, name in enumerate(names) if name in names[:index]), None)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (rb'{"a": 1, "\u0061": 2}', "a"),
        (rb'{"a/b": 1, "a\/b": 2}', "a/b"),
        (rb'{"a\\b": 1, "a\\b": 2, "c": "a\b"}', "a\\b"),
        (rb'{"a\",\"b": 1, "a\",\"b": 2, "c": ["a","b"]}', 'a","b'),
    ],
)
def test_a_name_may_be_written_in_escapes(body: bytes, name: str) -> None:
    assert find_duplicate(body, json.loads(body)) == name


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", b'"messages": [{"role": "user", "content": "Hi"}]'),
        ("/v1/completions", b'"prompt": "Hi"'),
        ("/v1/embeddings", b'"input": "Hi"'),
        ("/v1/score", b'"text_1": "Hi", "text_2": "Ho"'),
        ("/v1/rerank", b'"query": "Hi", "documents": ["Ho"]'),
        ("/v1/messages", b'"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3'),
        ("/v1/messages/count_tokens", b'"messages": [{"role": "user", "content": "Hi"}]'),
        ("/v1/responses", b'"input": "Hi"'),
        ("/tokenize", b'"prompt": "Hi"'),
        ("/detokenize", b'"tokens": [72]'),
    ],
)
async def test_every_route_refuses_it(server: Any, model: Any, path: str, body: bytes) -> None:
    reply = await server.post(path, b'{"model": "n", ' + body + b', "model": "m"}')

    assert reply.status == 400
    assert "duplicate field `model`" in reply.json()["error"]["message"]
    assert model.count == 0


async def test_inner_objects_and_texts_may_repeat_names(server: Any, model: Any) -> None:
    model.script = lambda call: call.finish(text="x")
    message = b'{"role": "user", "content": "\\"model\\": 1, \\"model\\": 2", "name": "a", "name": "b"}'

    reply = await server.post(
        "/v1/chat/completions", b'{"model": "m", "messages": [' + message + b'], "user": "model"}'
    )

    assert reply.status == 200
