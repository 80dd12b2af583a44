"""The base of every plugin's settings."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

#: The key under which a plugin that wraps another one of its kind has the section of that.
NESTED = "then"


class PluginConfig(BaseModel):
    """Settings of one plugin: the keys of its section beside `use`. Unknown keys are refused.

    Give every field a type, a default where one makes sense, and a description (``Field(description=…)``): the
    configuration schema and `dynamo config show` are made from them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    #: The fields that `Plugin.reconfigure` changes while the plugin runs; a change of another one needs a restart. A
    #: plugin without that method cannot be defined with them.
    LIVE: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        if unknown := cls.LIVE - cls.model_fields.keys():
            raise TypeError(f"{cls.__name__}.LIVE names {', '.join(sorted(unknown))}, which is no field")

    def remarks(self) -> list[str]:
        """Return hints for the operator about valid settings, a sentence each; ``dynamo check`` prints them."""
        return []


class PluginRef(BaseModel):
    """A section inside the section of a router, which picks the router that it wraps.

    A field of a router's `PluginConfig`, called `then`: ``then: PluginRef`` or ``then: PluginRef | None = None``. Core
    loads the plugin that `use` names and checks the other keys by its model; they are not kept here. The wrapping
    router gets the router from `RouterServices.inner`.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    use: Annotated[str, StringConstraints(min_length=1)] = Field(description="Name of the plugin.")


class SettingsMismatch(ValueError):
    """Contradicting settings, raised in a validator of a `PluginConfig`.

    The text may name keys, never values. Unlike the text of any other `ValueError` it is shown even if a value beside
    it may be a secret.
    """
