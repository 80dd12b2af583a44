"""Tests of a plugin's settings, made from the values that they must refuse.

An author assigns what these functions return to names that begin with ``test_``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dynamo_core.contracts.config import PluginConfig
from dynamo_core.errors import ConfigError
from pydantic import ValidationError

from dynamo_testing.optional_packages import pytest


def refused_settings(
    config: type[PluginConfig], refused: Sequence[tuple[dict[str, Any], str]], *, secret: str | None = None
) -> Callable[..., None]:
    """Return a test per settings: they are refused with a message that matches, which does not repeat the secret."""

    def test(settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ValidationError, match=message) as caught:
            config.model_validate(settings)
        assert secret is None or secret not in str(caught.value.errors(include_input=False))

    each: Callable[..., None] = pytest.mark.parametrize(("settings", "message"), refused)(test)
    return each


def unusable_certificates(make: Callable[[dict[str, Any]], object]) -> Callable[..., None]:
    """Return a test per file of `tls`: one that cannot be used is named. `make` makes a transport with this `tls`."""

    @pytest.mark.parametrize("key", ["ca", "cert"])
    def test(tmp_path: Path, key: str) -> None:
        tls = {"ca": tmp_path / "no"} if key == "ca" else {"cert": tmp_path / "no", "key": tmp_path / "no"}

        with pytest.raises(ConfigError, match=r"transport\.tls.*cannot be used.*PEM"):
            make(tls)

    return test


def listed_settings(page: str, config: type[PluginConfig]) -> Callable[..., None]:
    """Return a test that the tables of a page list every setting, each with its default if that is a number."""

    def test() -> None:
        rows = dict(re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", page, re.M))
        listed = {name: row for row in rows for name in re.findall(r"`([a-z_.]+)`", row)}
        defaults = config()

        assert {name.partition(".")[0] for name in listed} >= set(config.model_fields)
        for name, row in listed.items():
            value = getattr(defaults, name, None)
            if isinstance(value, (int, float)):
                shown = str(value).lower() if isinstance(value, bool) else f"{value:g}"
                assert shown in rows[row].replace("`", "").split(", "), name

    return test
