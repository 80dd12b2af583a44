"""The configuration: one file, a few layers over it, and for every value a note of where it came from.

The names below are loaded when first used, so that the command line's ``--help`` stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo_core.settings.flags import FLAGS, PROCESS_NAMES, Flag
    from dynamo_core.settings.loader import LoadedSettings, SettingsView, load_settings, view_settings
    from dynamo_core.settings.model import (
        AdminSettings,
        AuthSettings,
        ClientSettings,
        EventsSection,
        FrontendSection,
        HttpSettings,
        LogSettings,
        ModelSettings,
        PluginSection,
        Settings,
        WorkerSettings,
    )
    from dynamo_core.settings.schema import config_schema

_HOME = {
    "FLAGS": "flags",
    "PROCESS_NAMES": "flags",
    "Flag": "flags",
    "LoadedSettings": "loader",
    "SettingsView": "loader",
    "load_settings": "loader",
    "view_settings": "loader",
    "AdminSettings": "model",
    "AuthSettings": "model",
    "ClientSettings": "model",
    "EventsSection": "model",
    "FrontendSection": "model",
    "HttpSettings": "model",
    "LogSettings": "model",
    "ModelSettings": "model",
    "PluginSection": "model",
    "Settings": "model",
    "WorkerSettings": "model",
    "config_schema": "schema",
}

__all__ = [
    "FLAGS",
    "PROCESS_NAMES",
    "AdminSettings",
    "AuthSettings",
    "ClientSettings",
    "EventsSection",
    "Flag",
    "FrontendSection",
    "HttpSettings",
    "LoadedSettings",
    "LogSettings",
    "ModelSettings",
    "PluginSection",
    "Settings",
    "SettingsView",
    "WorkerSettings",
    "config_schema",
    "load_settings",
    "view_settings",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
