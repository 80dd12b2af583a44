"""The plugin under check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dynamo_core.contracts.config import PluginConfig
from dynamo_core.plugins.metadata import PluginEntry


@dataclass(frozen=True, slots=True)
class Subject:
    """A plugin with its settings, and the options of its kit."""

    entry: PluginEntry
    cls: Any
    config: PluginConfig
    #: Words of a request to a frontend: method, path and body, in which MODEL and PROMPT stand for both.
    request: str = ""
    streaming_request: str = ""
    #: Attributes of the kit, such as `CAN_PIN`.
    attributes: Mapping[str, Any] = field(default_factory=dict)

    #: The one that is checked now: pytest makes the classes of checks, so that they are told in no other way.
    current: ClassVar[Subject | None] = None


def subject() -> Subject:
    """Return the plugin that is checked now."""
    assert Subject.current is not None
    return Subject.current
