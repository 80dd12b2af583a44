"""Keys, tokens, certificates and origins in the settings: what is refused, and what is never shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from dynamo_core.errors import ConfigError
from dynamo_runtime.settings import load_settings

KEY = "dyn-this-is-a-key-and-not-a-hash"


def refused(tmp_path: Path, text: str) -> str:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(path, env={})
    return str(caught.value)


def test_a_key_in_place_of_its_hash_is_refused_without_being_shown(tmp_path: Path) -> None:
    told = refused(tmp_path, f"auth:\n  keys:\n    - {{id: a, hash: {KEY}}}\n")

    assert "the hash of key 'a' is not `sha256:` and 64 hexadecimal digits" in told
    assert KEY not in told


def test_a_key_under_a_name_that_is_none_is_refused_without_being_shown(tmp_path: Path) -> None:
    told = refused(tmp_path, f"auth: {{keys: [{{id: a, key: {KEY}}}]}}")

    assert "auth.keys[0].key: unknown key" in told
    assert KEY not in told


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("hsh: x", "auth.keys[0].hsh: unknown key; did you mean 'hash'?"),
        ("model: [m]", "auth.keys[0].model: unknown key; did you mean 'models'?"),
        ("token: x", "auth.keys[0].token: unknown key; known: env, hash, id, models, priority, tenant"),
    ],
)
def test_a_wrong_key_of_an_entry_names_the_right_one(tmp_path: Path, wrong: str, says: str) -> None:
    assert says in refused(tmp_path, f"auth: {{keys: [{{id: a, {wrong}}}]}}")


@pytest.mark.parametrize("origin", ["*", "null", "chat.example.com", "https://a.example.com/", "https://*.example.com"])
def test_an_origin_is_a_scheme_and_a_host_and_nothing_more(tmp_path: Path, origin: str) -> None:
    assert "http.cors.origins" in refused(tmp_path, f"http: {{cors: {{origins: ['{origin}']}}}}")


def test_a_private_key_without_a_certificate_is_refused(tmp_path: Path) -> None:
    assert "frontend.tls: key is given without cert" in refused(tmp_path, "frontend: {tls: {key: a.pem}}")


def test_the_operators_token_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"admin: {{token: {KEY}}}")

    assert KEY not in json.dumps(load_settings(path, env={}).dump())
