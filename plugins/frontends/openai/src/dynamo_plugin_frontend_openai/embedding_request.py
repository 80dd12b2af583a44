"""Embedding requests."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from dynamo_generation.bodies.decode import NOT_EMPTY, schema_error, to_struct
from dynamo_generation.requests import fields
from dynamo_generation.requests.common import invalid
from dynamo_generation.requests.completions import PromptInput, split_inputs

MAX_INPUTS = 2048
ENCODINGS = ("base64", "float")


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """An embedding request."""

    #: Lists whose items `split_inputs` checks.
    ANY_LISTS: ClassVar = ("input",)

    model: Annotated[str, NOT_EMPTY]
    input: Annotated[str | list[Any], NOT_EMPTY]
    encoding_format: str | None = None
    dimensions: Annotated[int, msgspec.Meta(le=2**31 - 1)] | None = None
    user: str | None = None


def parse_embedding(raw: dict[str, Any]) -> tuple[EmbeddingRequest, list[PromptInput]]:
    """Checks an embedding request as far as no model is needed for it; also gives its inputs.

    Raises:
        InvalidArgument: naming the field.
    """
    request = to_struct(raw, EmbeddingRequest)
    if request.encoding_format not in (None, *ENCODINGS):
        known = " or ".join(f"'{name}'" for name in ENCODINGS)
        raise schema_error(f"expected {known}, got {request.encoding_format!r} - at `$.encoding_format`")
    inputs = split_inputs(request.input, "input", "Input")
    fields.check_known(raw, EmbeddingRequest.__struct_fields__, fields.EMBEDDINGS)
    if not request.model.strip():
        raise invalid("Model cannot be empty", "model")
    if len(inputs) > MAX_INPUTS:
        raise invalid(f"At most {MAX_INPUTS} inputs are allowed, got {len(inputs)}", "input")
    if request.dimensions is not None and request.dimensions < 1:
        raise invalid(f"Dimensions must be greater than 0, got {request.dimensions}", "dimensions")
    if request.user is not None and not request.user.strip():
        raise invalid("User ID cannot be empty", "user")
    return request, inputs
