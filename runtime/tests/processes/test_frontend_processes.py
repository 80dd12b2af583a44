"""Which processes a config with several frontends asks for, and which configs cannot have them."""

from __future__ import annotations

from pathlib import Path

import pytest
from dynamo_core.errors import ConfigError
from dynamo_core.plugins.loader import PluginLoader
from dynamo_runtime.assembly.process_roles import role_of
from dynamo_runtime.assembly.resolve import resolve
from dynamo_runtime.processes.supervisor import parts_of
from dynamo_runtime.settings import LoadedSettings, load_settings

WORKERS = "workers: {mock: {model: {name: m}, engine: {use: mocker}, replicas: 2}}\n"
ACROSS = "transport: {use: tcp}\ndiscovery: {use: file}\n"


def load(folder: Path, *lines: str) -> LoadedSettings:
    path = folder / "config.yaml"
    path.write_text(WORKERS + "\n".join(lines))
    return load_settings(path, env={})


def commands(loaded: LoadedSettings, only: str | None, port: int | None) -> list[str]:
    workers = role_of(loaded.settings, only).workers
    return [" ".join(part.arguments()) for part in parts_of(loaded.settings, workers, port)]


def test_one_frontend_process_needs_no_replica_number(tmp_path: Path) -> None:
    loaded = load(tmp_path, ACROSS)

    assert commands(loaded, None, None) == [
        "--only workers.mock --replica 0",
        "--only workers.mock --replica 1",
        "--only frontend",
    ]
    assert role_of(loaded.settings, "frontend").name == "frontend"
    assert not role_of(loaded.settings, "frontend").whole


def test_several_frontend_processes_get_number_and_shared_port(tmp_path: Path) -> None:
    loaded = load(tmp_path, ACROSS, "frontend: {processes: 2, port: 0}")

    assert commands(loaded, None, 1234)[2:] == [
        "--only frontend --replica 0 --http-port 1234",
        "--only frontend --replica 1 --http-port 1234",
    ]


def test_a_command_for_the_frontend_supervises_several_and_no_worker(tmp_path: Path) -> None:
    loaded = load(tmp_path, ACROSS, "frontend: {processes: 2}")

    assert role_of(loaded.settings, "frontend").whole
    assert commands(loaded, "frontend", 8000) == [
        "--only frontend --replica 0 --http-port 8000",
        "--only frontend --replica 1 --http-port 8000",
    ]
    one = role_of(loaded.settings, "frontend", 1)
    assert (one.whole, one.name, one.processes) == (False, "frontend-1", 2)


def test_several_cannot_be_where_everything_is_one_process(tmp_path: Path) -> None:
    loaded = load(tmp_path, "frontend: {processes: 3}")

    with pytest.raises(ConfigError) as raised:
        resolve(loaded, PluginLoader())

    for word in ("config.yaml:2", "frontend.processes", "3 processes", "'inproc'", "'tcp'"):
        assert word in str(raised.value)


@pytest.mark.parametrize(("admin", "wrong"), [(7998, True), (8000, True), (7997, False), (8001, False)])
def test_the_admin_ports_of_all_of_them_keep_clear_of_the_public_one(tmp_path: Path, admin: int, wrong: bool) -> None:
    loaded = load(tmp_path, ACROSS, "frontend: {processes: 3, port: 8000}", f"admin: {{port: {admin}}}")

    if not wrong:
        resolve(loaded, PluginLoader())
        return
    with pytest.raises(ConfigError, match=r"admin\.port: 8000 is the port of the frontend too"):
        resolve(loaded, PluginLoader())


@pytest.mark.parametrize("processes", ["0", "true", "two"])
def test_a_number_that_is_none_is_refused(tmp_path: Path, processes: str) -> None:
    with pytest.raises(ConfigError, match=r"frontend\.processes"):
        load(tmp_path, ACROSS, f"frontend: {{processes: {processes}}}")
