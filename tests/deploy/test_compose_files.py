"""The compose files, by the Compose specification."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

STACK = Path(__file__).parents[2] / "examples" / "mocker"
FILES = sorted(path.name for path in STACK.glob("docker-compose*.yml"))


def test_there_are_compose_files_with_and_without_servers() -> None:
    assert FILES == ["docker-compose.tcp.yml", "docker-compose.yml"]


@pytest.mark.parametrize("name", FILES)
def test_compose_files_follow_the_compose_schema(name: str, library: Callable[[str], Any]) -> None:
    text = json.dumps(yaml.safe_load((STACK / name).read_text()))

    library("compose_spec").PyCompose.from_json(text)


@pytest.mark.parametrize("name", FILES)
def test_build_contexts_and_mounts_exist(name: str) -> None:
    compose = yaml.safe_load((STACK / name).read_text())

    for service in compose["services"].values():
        if "build" in service:
            context = STACK / service["build"]["context"]
            assert (context / service["build"].get("dockerfile", "Dockerfile")).is_file()
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert (STACK / source).is_file() if source.startswith(".") else source in compose["volumes"]
    profile = compose["services"]["frontend"]["environment"]["DYN_PROFILE"]
    assert profile in yaml.safe_load((STACK / "dynamo.yaml").read_text())["profiles"]
