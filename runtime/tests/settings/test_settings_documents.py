"""Files and texts as they are read: values, lines, and what is left as it was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dynamo_runtime.settings import load_settings
from dynamo_runtime.settings.documents import parse_text, read_document
from dynamo_runtime.settings.tree import Leaf, Table, find, leaves, to_plain
from hypothesis import given
from hypothesis import strategies as st

ConfigFile = Callable[..., Path]

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=5), below, max_size=3),
    max_leaves=6,
)


def origins(table: Table) -> dict[str, str]:
    return {".".join(path): leaf.origin for path, leaf in leaves(table)}


def test_yaml_keys_keep_their_lines(config_file: ConfigFile) -> None:
    path = config_file(
        """
        # a comment
        namespace: x

        frontend: {use: openai,
                   port: 9000}
        hooks:
          - a
          - b
        """
    )

    assert origins(read_document(path).tree) == {
        "namespace": "config.yaml:2",
        "frontend.use": "config.yaml:4",
        "frontend.port": "config.yaml:5",
        "hooks": "config.yaml:6",
    }


def test_yaml_anchors_and_merge_keys_work_as_usual(config_file: ConfigFile) -> None:
    path = config_file(
        """
        a: &a {x: 1, y: 2}
        b: &b {y: 3, z: 4}
        c:
          <<: [*a, *b]
          x: 5
        d: {<<: *a}
        """
    )

    document = to_plain(read_document(path).tree)

    assert document["c"] == {"x": 5, "y": 2, "z": 4}
    assert document["d"] == {"x": 1, "y": 2}


def test_an_empty_file_sets_nothing(config_file: ConfigFile) -> None:
    path = config_file("# nothing\n")

    assert to_plain(read_document(path).tree) == {}
    assert load_settings(path, env={}).settings.workers == {}


def test_an_invalid_date_stays_text(config_file: ConfigFile) -> None:
    path = config_file("a: 2024-13-99")

    assert to_plain(read_document(path).tree) == {"a": "2024-13-99"}


def test_toml_keys_keep_their_lines(config_file: ConfigFile) -> None:
    path = config_file(
        '''
        namespace = "x"
        hooks = [
          "a",
        ]
        client.retries = 3
        text = """
        frontend = 1
        """

        [frontend]  # a comment
        "port" = 9000

        [workers.mock]
        model = {name = "m", path = "p"}
        engine.use = "mocker"
        ''',
        "config.toml",
    )

    assert origins(read_document(path).tree) == {
        "namespace": "config.toml:1",
        "hooks": "config.toml:2",
        "client.retries": "config.toml:5",
        "text": "config.toml:6",
        "frontend.port": "config.toml:11",
        "workers.mock.model.name": "config.toml:14",
        "workers.mock.model.path": "config.toml:14",
        "workers.mock.engine.use": "config.toml:15",
    }


def test_toml_and_yaml_make_the_same_settings(config_file: ConfigFile) -> None:
    toml = config_file("[workers.mock]\nmodel = {name = 7}\nengine = {use = 'mocker', ratio = 1.5}", "config.toml")
    text = config_file("workers: {mock: {model: {name: 7}, engine: {use: mocker, ratio: 1.5}}}")

    assert load_settings(toml, env={}).settings == load_settings(text, env={}).settings


@given(VALUES)
def test_json_in_a_variable_comes_back_as_the_same_value(value: Any) -> None:
    text = json.dumps(value)

    node = parse_text(text, "here")

    if isinstance(value, float):
        # YAML wants a dot in floats, and takes 1e+16 for a text; pydantic makes a number of it again.
        assert float(to_plain(node)) == value
        return
    assert to_plain(node) == value
    assert node.origin == "here"


@given(st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1).filter(lambda text: text[0] not in "[{\"'"))
def test_a_text_in_a_variable_reaches_a_text_setting_as_it_was_written(text: str) -> None:
    if "${" in text or text.lower() in ("null", "~"):
        return

    loaded = load_settings(env={"DYN_MODEL_NAME": text})

    assert loaded.settings.workers["mock"].model.name == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("abc #def", "abc #def"),
        ("user: pass", "user: pass"),
        ("*star", "*star"),
        ("!bang", "!bang"),
        ("<<", "<<"),
        ("[open", "[open"),
        ("{a: 1, a: 2}", "{a: 1, a: 2}"),
        ("nats://h:4222", "nats://h:4222"),
        ("'007'", "007"),
        (" x ", "x"),
        ("' x '", " x "),
        ("'", "'"),
        ("a\nb", "a\nb"),
        ("null", None),
        ("1.5", 1.5),
        ("true", True),
        ("[a, 1]", ["a", 1]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
    ],
)
def test_a_text_is_read_as_one_value(text: str, value: Any) -> None:
    assert to_plain(parse_text(text, "here")) == value


def test_parsed_mappings_name_the_variable_for_every_value() -> None:
    node = parse_text("{a: {b: 1}}", "here")

    assert isinstance(node, Table)
    leaf = find(node, ("a", "b"))
    assert isinstance(leaf, Leaf)
    assert leaf.origin == "here"
