"""`frontend` as a list of APIs, which share one listener."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dynamo_core.errors import ConfigError
from dynamo_runtime.settings import load_settings

LISTED = """
frontend:
  - {use: openai, port: 9000, chat_path: /chat}
  - {use: ollama, limits: {tokens: 5}}
profiles:
  one: {frontend: [{use: ollama, limits: {tokens: 6}}]}
"""


def test_a_list_is_one_section_with_the_names_of_its_apis(config_file: Callable[..., Path]) -> None:
    loaded = load_settings(config_file(LISTED), env={"DYN_FRONTEND__CHAT_PATH": "/talk"}, sets=["frontend.port=9001"])

    frontend = loaded.settings.frontend
    assert (frontend.use, frontend.apis, frontend.port) == ("openai", ("openai", "ollama"), 9001)
    assert frontend.options == {"chat_path": "/talk", "limits": {"tokens": 5}}


def test_a_list_in_a_profile_takes_the_place_of_the_apis_below_it(config_file: Callable[..., Path]) -> None:
    loaded = load_settings(config_file(LISTED), profile="one", env={})

    assert loaded.settings.frontend.apis == ("ollama",)
    assert loaded.settings.frontend.options == {"limits": {"tokens": 6}}
    assert loaded.settings.frontend.port == 9000


@pytest.mark.parametrize(
    "upper",
    [
        {"env": {"DYN_FRONTEND__USE": "ollama"}},
        {"env": {}, "sets": ["frontend.use=ollama"]},
        {"env": {}, "sets": ["frontend=[{use: a}, {use: b}]", "frontend.use=ollama"]},
        {"env": {"DYN_FRONTEND": "[{use: a}, {use: b}]", "DYN_FRONTEND__USE": "ollama"}},
    ],
)
def test_a_layer_that_picks_an_api_does_not_mean_the_list_below_it(
    config_file: Callable[..., Path], upper: dict[str, Any]
) -> None:
    frontend = load_settings(config_file(LISTED), **upper).settings.frontend

    assert (frontend.use, frontend.apis, frontend.port) == ("ollama", None, 9000)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("frontend: [{use: a, port: 1}, {use: b, port: 2}]", "frontend[1].port: another entry has another value, at"),
        ("frontend: [{use: a}, {port: 2}]", "frontend[1]: expected an API such as {use: openai}"),
        ("frontend: [openai]", "frontend[0]: expected an API such as {use: openai}"),
        ("frontend: [{use: a}, {use: a}]", "frontend[1]: 'a' is listed twice"),
        ("frontend: []", "frontend: name at least one API"),
        ("frontend: [{use: a, apis: [b]}]", "frontend[0]: expected an API such as {use: openai}"),
        ("frontend: {use: a, apis: [b]}", "`apis` must name each API once, that of `use` among them"),
    ],
)
def test_conflicting_apis_are_refused(config_file: Callable[..., Path], text: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_settings(config_file(text), env={})

    assert words in str(raised.value)
