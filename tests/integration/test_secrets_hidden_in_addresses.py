"""No command repeats a secret that an operator put into the address of a server, for any plugin that has one."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from dynamo_runtime.cli.main import cli

SECRET = "hunter2/@x"

#: The setting of each plugin that is an address: the config with `{}` in its place, and the address without a secret.
SETTINGS = {
    "transport nats": ("transport: {{use: nats, servers: ['nats://good:4222', {}]}}", "nats://{}h:4222"),
    "transport redis": ("transport: {{use: redis, url: {}}}", "redis://{}h:6379"),
    "discovery redis": ("discovery: {{use: redis, url: {}}}", "redis://{}h:6379"),
    "discovery etcd": ("discovery: {{use: etcd, endpoints: [{}]}}", "http://{}h:2379"),
    "discovery kubernetes": ("discovery: {{use: kubernetes, url: {}}}", "https://{}h:443"),
    "admission fair-queue": (
        "admission: {{use: fair-queue, default: {{concurrency: 1}}, shared: {{url: {}}}}}",
        "redis://{}h:6379",
    ),
    "admission rate-limit": (
        "admission: {{use: rate-limit, requests_per_minute: 1, shared: {{url: {}}}}}",
        "redis://{}h:6379",
    ),
    "router slot-tracker": ("router: {{use: slot-tracker, url: {}}}", "http://{}h:8091"),
    "engine upstream": (
        "workers: {{w: {{model: {{name: m}}, engine: {{use: upstream, url: {}}}}}}}",
        "http://{}h:8000",
    ),
}
FORMS: dict[str, Callable[[str], str]] = {
    "a user alone": lambda address: address.format(f"{SECRET}@"),
    "a password": lambda address: address.format(f"user:{SECRET}@"),
    "a key in the query": lambda address: f"{address.format('')}?api_key={SECRET}",
    "a fragment": lambda address: f"{address.format('')}#{SECRET}",
    "no scheme": lambda address: address.format(f"{SECRET}@").partition("://")[2],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_secret_in_an_address_is_refused_and_not_repeated(
    setting: str, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, address = SETTINGS[setting]
    path = tmp_path / "dynamo.yaml"
    workers = "" if "workers" in config else "\nworkers: {mock: {model: {name: m}, engine: {use: mocker}}}"
    path.write_text(config.format(json.dumps(FORMS[form](address))) + workers)

    with caplog.at_level(logging.DEBUG):
        shown = CliRunner().invoke(cli, ["config", "show", "--origin", str(path)])
        checked = CliRunner().invoke(cli, ["check", str(path)])

    assert shown.exit_code == 0, shown.output
    assert checked.exit_code == 2, checked.output
    assert "dynamo.yaml" in checked.output
    for text in (shown.output, checked.output, caplog.text):
        assert "hunter2" not in text
