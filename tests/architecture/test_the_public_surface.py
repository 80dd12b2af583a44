"""What the packages of the project show: a list that changes on purpose."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

PINNED = Path(__file__).with_name("public_names.txt")
PACKAGES = (
    "dynamo_core",
    "dynamo_core.kv",
    "dynamo_core.protocol",
    "dynamo_http",
    "dynamo_leases",
    "dynamo_redis",
    "dynamo_runtime",
    "dynamo_telemetry",
    "dynamo_testing",
    "dynamo_text",
)


def shown(package: str) -> list[str]:
    names: list[str] = import_module(package).__all__
    return [f"{package}.{name}" for name in names]


def test_the_public_names_are_those_of_the_list() -> None:
    assert [name for package in PACKAGES for name in shown(package)] == PINNED.read_text().split()


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_can_be_had_and_no_other(package: str) -> None:
    module = import_module(package)

    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in dir(module)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'no_such_name'"):
        module.no_such_name  # noqa: B018
