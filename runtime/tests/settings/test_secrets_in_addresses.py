"""A secret in an address is shown nowhere, wherever in the address it stands and whatever characters it has."""

from __future__ import annotations

import json
import traceback
from typing import Any

import pytest
from dynamo_core.contracts.config import PluginConfig
from dynamo_core.errors import ConfigError
from dynamo_runtime.settings import load_settings
from dynamo_runtime.settings.secrets_in_settings import redacted, without_credentials
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, field_validator

#: What must not be seen. A secret has it in its middle, beside anything.
CORE = "hunter2"

ANYTHING = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x17F, blacklist_characters="$"), max_size=8)
PLAIN = st.text("abcXYZ019-_.~%", max_size=8)
SCHEMES = st.sampled_from(["nats", "tls", "redis", "rediss", "http", "https", "amqp+ssl"])
KEYS = st.sampled_from(
    ["url", "servers", "endpoints", "peers", "dsn", "broker_url", "otlp-endpoint", "address", "snapshot_from_urls"]
)


def secrets(around: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(around, around).map(lambda ends: f"{ends[0]}{CORE}{ends[1]}")


#: Addresses with a secret, of every form that servers take.
ADDRESSES = st.one_of(
    st.builds("{}://{}@h:4222".format, SCHEMES, secrets(ANYTHING)),
    st.builds("{}://user:{}@h:4222/0".format, SCHEMES, secrets(ANYTHING)),
    st.builds("{}://:{}@[::1]:6379".format, SCHEMES, secrets(ANYTHING)),
    st.builds("{}://h:1,user:{}@h2:1".format, SCHEMES, secrets(ANYTHING)),
    st.builds("{}://h:1/p?{}={}".format, SCHEMES, PLAIN, secrets(ANYTHING)),
    st.builds("{}://h?a=1&api_key={}".format, SCHEMES, secrets(ANYTHING)),
    st.builds("{}://h?{}".format, SCHEMES, secrets(ANYTHING)),
    st.builds("{}://h/#{}".format, SCHEMES, secrets(ANYTHING)),
    st.builds("{}://h;password={}".format, SCHEMES, secrets(PLAIN)),
    st.builds("{}@h:4222".format, secrets(ANYTHING)),
    st.builds("user:{}@h:4222".format, secrets(ANYTHING)),
    st.builds("h:4222?password={}".format, secrets(ANYTHING)),
    st.builds("host=h user=u password={} dbname=d".format, secrets(PLAIN)),
    st.builds("host=h password='a {}'".format, secrets(PLAIN)),
)
#: How a setting may hold an address.
SHAPES = st.sampled_from(
    [
        lambda address: address,
        lambda address: [address],
        lambda address: ["nats://plain:4222", address],
        lambda address: {"a": address},
        lambda address: [{"b": [address]}],
        lambda address: {"nested": {"list": [address, 1, None]}},
    ]
)


class Choosy(PluginConfig):
    """Refuses every address, in words that repeat it."""

    url: int | None = None
    servers: list[int] = Field(default_factory=list)

    @field_validator("*", mode="before")
    @classmethod
    def _repeats(cls, value: Any) -> Any:
        if CORE in repr(value):
            raise ValueError(f"{value!r} is not what it should be")
        return value


@settings(max_examples=100)
@given(key=KEYS, address=ADDRESSES, shape=SHAPES)
def test_no_dump_and_no_error_shows_it(key: str, address: str, shape: Any) -> None:
    loaded = load_settings(env={}, sets=["transport.use=x", f"transport.{key}={json.dumps(shape(address))}"])

    assert CORE in repr(loaded.dump(redact=False))
    assert CORE not in repr(loaded.dump())
    assert CORE not in repr(loaded.rows())
    assert CORE not in repr(loaded.settings)
    with pytest.raises(ConfigError) as caught:
        loaded.plugin_config("transport", Choosy)
    assert CORE not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("url", "nats://TOKEN@h:4222", "nats://***@h:4222"),
        ("url", "redis://me:p/w@h:1/0", "redis://***@h:1/0"),
        ("servers", ["nats://a:4222", "nats://u:p@ss@b:4222"], ["nats://a:4222", "nats://***@b:4222"]),
        ("endpoint", "https://h:1/v1?api_key=x&a=b", "https://h:1/v1?***"),
        ("address", "u:p@h:1", "***@h:1"),
        ("server", "TOKEN@h:1", "***@h:1"),
        ("url", "https://h:1/v1", "https://h:1/v1"),
        ("bind", "[::1]:4222", "[::1]:4222"),
        ("text", "host=h password=x port=1", "host=h password=*** port=1"),
        ("payload", "@request.json", "@request.json"),
        ("greeting", "Who are you? Tell me # all", "Who are you? Tell me # all"),
        ("maintainer", "me@example.org", "me@example.org"),
        ("ratio", 0.5, 0.5),
    ],
)
def test_addresses_are_shown_without_credentials(key: str, value: Any, shown: Any) -> None:
    assert redacted(["transport", key], value) == shown


@given(st.text())
def test_redaction_is_idempotent(text: str) -> None:
    once = without_credentials(text, address=True)

    assert without_credentials(once, address=True) == once
