"""``dynamo key new``: what it prints is what the settings take."""

from __future__ import annotations

import json
from collections.abc import Callable

import yaml
from click.testing import Result
from dynamo_http.auth import hash_of
from dynamo_http.settings import AuthSettings

RunCli = Callable[..., Result]


def test_a_key_and_its_entry_are_printed(dynamo: RunCli) -> None:
    lines = dict(line.split(":", 1) for line in dynamo("key", "new", "--id", "team-a").stdout.splitlines())
    key, entry = lines["key"].strip(), yaml.safe_load(lines["entry"])

    assert entry == {"id": "team-a", "hash": hash_of(key)}
    assert AuthSettings(keys=(entry,)).keys[0].hash == hash_of(key)


def test_key_new_as_json_is_one_object(dynamo: RunCli) -> None:
    made = json.loads(dynamo("key", "new", "--json").stdout)

    assert made["hash"] == hash_of(made["key"])
    assert made["key"] != json.loads(dynamo("key", "new", "--json").stdout)["key"]
