"""Values written as plain text become what the schema of the tool asks for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from dynamo_plugin_parsers_standard.schema_values import ANY_JSON, ParameterTypes, Types, json_of
from hypothesis import given
from hypothesis import strategies as st

KINDS = ["string", "integer", "number", "boolean", "null", "object", "array", "json"]


def types(*names: str) -> Types:
    return frozenset(names)


@pytest.mark.parametrize(
    ("text", "kinds", "expected"),
    [
        ("5", types("string"), '"5"'),
        ("null", types("string"), '"null"'),
        ("5", types("integer"), "5"),
        (" 5\n", types("integer"), "5"),
        ("007", types("integer"), "7"),
        ("3.0", types("integer"), "3"),
        ("3.5", types("integer"), '"3.5"'),
        ("five", types("integer"), '"five"'),
        ("", types("integer"), '""'),
        ("1.50", types("number"), "1.50"),
        (".5", types("number"), "0.5"),
        ("1e999", types("number"), '"1e999"'),
        ("NaN", types("number"), '"NaN"'),
        ("True", types("boolean"), "true"),
        ("0", types("boolean"), "false"),
        ("yes", types("boolean"), '"yes"'),
        ("None", types("null"), "null"),
        ("null", types("string", "null"), "null"),
        ("nul", types("string", "null"), '"nul"'),
        ("5", types("string", "integer"), "5"),
        ("5a", types("string", "integer"), '"5a"'),
        ('{"a":  1}', types("object"), '{"a":  1}'),
        ("{'a': None, 'b': (1, True)}", types("object"), '{"a": null, "b": [1, true]}'),
        ("{'a': 1, 'a': 2}", types("object"), "\"{'a': 1, 'a': 2}\""),
        ("{'a': 1} # one", types("object"), "\"{'a': 1} # one\""),
        ("[1]", types("object"), '"[1]"'),
        ("[1]", types("array"), "[1]"),
        ("[1", types("array"), '"[1"'),
        ("[NaN]", types("array"), '"[NaN]"'),
        ("5", ANY_JSON, "5"),
        ('"x"', ANY_JSON, '"x"'),
        ("x", ANY_JSON, '"x"'),
    ],
)
def test_a_value_is_of_the_type_of_its_schema_or_a_string(text: str, kinds: Types, expected: str) -> None:
    assert json_of(text, kinds) == expected


@given(st.text() | st.text("{}[]'\",:0123456789.eE+-#() \n"), st.sets(st.sampled_from(KINDS)))
def test_any_text_becomes_json_and_strings_are_unchanged(text: str, kinds: set[str]) -> None:
    value = json.loads(json_of(text, frozenset(kinds)))

    if isinstance(value, str) and "json" not in kinds:
        assert value == text


def schema_types(schema: Any, **more: Any) -> Types | None:
    parameters = {"type": "object", "properties": {"a": schema}, **more}
    return ParameterTypes([{"type": "function", "function": {"name": "f", "parameters": parameters}}], "f").of("a")


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"}, types("integer")),
        ({"type": ["integer", "null"]}, types("integer", "null")),
        ({"type": "string", "nullable": True}, types("string", "null")),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, types("string", "null")),
        ({"oneOf": [{"type": "object"}, {"items": {}}]}, types("object", "array")),
        ({"enum": ["a", 1, None]}, types("string", "integer", "null")),
        ({"const": True}, types("boolean")),
        ({"properties": {}}, types("object")),
        ({"$ref": "#/$defs/P"}, types("number")),
        ({"anyOf": [{"$ref": "#/definitions/Q~1R"}, {"type": "null"}]}, types("array", "null")),
        ({"$ref": "#/$defs/Loop"}, None),
        ({"$ref": "#/$defs/none"}, None),
        ({"$ref": "https://elsewhere"}, None),
        ({"description": "anything"}, None),
        ({"type": 5, "anyOf": 6, "enum": 7}, None),
        (True, None),
        (None, None),
    ],
)
def test_the_types_of_a_schema(schema: Any, expected: Types | None) -> None:
    more = {
        "$defs": {"P": {"type": "number"}, "Loop": {"$ref": "#/$defs/Loop"}},
        "definitions": {"Q/R": {"type": "array"}},
    }
    assert schema_types(schema, **more) == expected


def test_a_parameter_that_the_schema_does_not_name_is_of_the_type_of_additional_ones() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"additionalProperties": {"type": "integer"}}}}

    assert ParameterTypes([tool], "f").of("a") == types("integer")
    assert ParameterTypes([tool], "g").of("a") is None


@pytest.mark.parametrize("tool", [{}, {"function": 5}, {"function": {"name": "f", "parameters": [1]}}])
def test_a_tool_without_a_schema_has_no_types(tool: dict[str, Any]) -> None:
    assert ParameterTypes([tool], "f").of("a") is None
