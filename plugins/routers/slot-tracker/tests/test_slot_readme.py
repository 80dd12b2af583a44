"""The tables of the README are those of the code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
from dynamo_plugin_router_slot_tracker.command import command
from dynamo_plugin_router_slot_tracker.router import SlotTrackerConfig

README = (Path(__file__).parents[1] / "README.md").read_text()


def table(header: str) -> dict[str, tuple[str, str]]:
    """Return default and meaning by name."""
    rows = README.partition(f"| {header} | Default | Meaning |\n| --- | --- | --- |\n")[2].partition("\n\n")[0]
    return {
        name: (default.strip("`"), meaning)
        for name, default, meaning in re.findall(r"\| `(.*?)` \| (.*?) \| (.*) \|", rows)
    }


def test_every_option_of_the_command_is_described() -> None:
    documented = table("Option")
    options = {option.opts[0]: option for option in command.params if isinstance(option, click.Option)}

    assert documented.keys() == options.keys()
    for name, option in options.items():
        default, meaning = documented[name]
        if option.is_flag:
            assert default == "off"
        elif option.show_default:
            assert isinstance(option.default, str | int | float)
            assert default == (option.default if isinstance(option.default, str) else f"{option.default:.15g}")
        else:
            assert default == "none"
        assert option.help is not None
        assert meaning.replace("`", "").startswith(option.help.replace("`", "").rstrip("."))


def test_every_setting_of_the_router_is_described() -> None:
    documented = table("Setting")

    assert documented == {
        name: ("none" if field.default is None else json.dumps(field.default), field.description)
        for name, field in SlotTrackerConfig.model_fields.items()
    }
