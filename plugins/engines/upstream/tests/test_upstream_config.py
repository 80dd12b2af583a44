"""The settings: addresses, and a key that never shows."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_plugin_engine_upstream.config import UpstreamConfig
from pydantic import ValidationError

URL = "http://host:8000"


@pytest.mark.parametrize(
    ("given", "base"),
    [
        (URL, "http://host:8000/v1"),
        (f"{URL}/", "http://host:8000/v1"),
        (f"{URL}/v1/", "http://host:8000/v1"),
        ("https://api.example.com/openai/v1", "https://api.example.com/openai/v1"),
        ("http://[::1]:11434", "http://[::1]:11434/v1"),
    ],
)
def test_an_address_without_a_path_means_v1(given: str, base: str) -> None:
    assert UpstreamConfig(url=given).url == base


@pytest.mark.parametrize("url", ["host:8000", "ftp://host", "http://", f"{URL}/v1?x=1", "http://host:no", "http://h:0"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="is not an address"):
        UpstreamConfig(url=url)


def test_an_address_with_a_password_is_refused_without_being_repeated() -> None:
    with pytest.raises(ValidationError, match="set `api_key`") as caught:
        UpstreamConfig(url="http://me:hunter2@host")

    assert "hunter2" not in str(caught.value.errors(include_input=False))


def test_the_key_shows_nowhere() -> None:
    config = UpstreamConfig.model_validate({"url": URL, "api_key": "sk-secret"})

    assert "sk-secret" not in f"{config!r} {config} {config.model_dump()}"


@pytest.mark.parametrize("key", ["sk-secret\n", "schlüssel"])
def test_a_key_that_no_header_can_hold_is_refused_without_being_repeated(key: str) -> None:
    with pytest.raises(ValidationError, match="perhaps the line end") as caught:
        UpstreamConfig.model_validate({"url": URL, "api_key": key})

    assert "secret" not in caught.value.errors(include_input=False)[0]["msg"]


def test_an_empty_key_is_none() -> None:
    assert UpstreamConfig.model_validate({"url": URL, "api_key": ""}).api_key is None


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"tls": {"ca": "x.pem"}}, "write https://"), ({"url": "https://h", "tls": {"cert": "x.pem"}}, "belong together")],
)
def test_encryption_must_make_sense(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        UpstreamConfig.model_validate({"url": URL} | settings)
