"""The page about the settings says what the code does."""

from __future__ import annotations

from pathlib import Path

from dynamo_plugin_router_kv.config import KvConfig

README = Path(__file__).parents[1] / "README.md"


def test_every_setting_has_a_row_with_its_default() -> None:
    rows = [line.split(" | ") for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    told = [(row[0].strip("| `"), row[1]) for row in rows]

    assert told == [(name, _shown(field.default)) for name, field in KvConfig.model_fields.items()]


def _shown(default: object) -> str:
    if default is None:
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    return str(int(default)) if isinstance(default, float) and default > 9 else str(default)
