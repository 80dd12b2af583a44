"""Types for fields of settings that say what they refuse."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, StringConstraints
from pydantic_core import PydanticKnownError


def not_a_bool(value: object) -> object:
    """Return the value unless it is a bool, which is refused as no integer."""
    # pydantic reads true as 1, which hides slips such as `replicas: yes`.
    if isinstance(value, bool):
        raise PydanticKnownError("int_type")
    return value


def not_a_bool_number(value: object) -> object:
    """Return the value unless it is a bool, which is refused as no number."""
    if isinstance(value, bool):
        raise PydanticKnownError("float_type")
    return value


# The bounds come first, so that the JSON Schema sees them; validators that run before them stand after.
NotBool = BeforeValidator(not_a_bool)
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(not_a_bool_number)]
SecondsOrZero = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(not_a_bool_number)]
Port = Annotated[int, Field(ge=0, le=65535), NotBool]
Count = Annotated[int, Field(ge=0), NotBool]
Positive = Annotated[int, Field(ge=1), NotBool]
#: Namespaces, components and endpoints are parts of keys and subjects, where dots and slashes separate.
Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]+$")]
Text = Annotated[str, StringConstraints(min_length=1)]
