"""Writes `recorded.json`: digests of the prompts that transformers makes. ``python -m tests.templates.record``."""

from __future__ import annotations

import json
from pathlib import Path

from tests.templates.conversations import CONVERSATIONS
from tests.templates.reference import FAMILIES, digest, library

RECORDED = Path(__file__).with_name("recorded.json")


def recorded() -> dict[str, dict[str, str]]:
    """Return the digests by the library, by family and conversation."""
    render = library()
    return {
        name: {title: digest(render(family, conversation)) for title, conversation in CONVERSATIONS.items()}
        for name, family in FAMILIES.items()
    }


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(recorded(), indent=1) + "\n")
