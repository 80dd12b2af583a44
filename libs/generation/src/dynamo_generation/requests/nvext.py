"""`nvext`: request fields beyond the OpenAI API."""

from __future__ import annotations

from typing import Literal

import msgspec
from dynamo_core.errors import InvalidArgument


class NvExt(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The extension object. Everything is optional; an unknown name is refused.

    `greed_sampling` is another spelling of `greedy_sampling`. `annotations_in` is the form of annotations in a stream.
    `session_id` names the session that the request belongs to.
    """

    ignore_eos: bool | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    greedy_sampling: bool | None = None
    greed_sampling: bool | None = None
    use_raw_prompt: bool | None = None
    annotations: list[str] | None = None
    annotations_in: Literal["events", "chunks"] | None = None
    session_id: str | None = None

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is to be taken always."""
        return bool(self.greedy_sampling or self.greed_sampling)


def check_nvext(nvext: NvExt) -> None:
    """Check the ranges.

    Raises:
        InvalidArgument: naming the field.
    """
    if nvext.top_k is not None and nvext.top_k != -1 and not 1 <= nvext.top_k < 2**31:
        raise InvalidArgument("Validation: top_k must be -1 or greater than or equal to 1", field="nvext.top_k")
    penalty = nvext.repetition_penalty
    if penalty is not None and not 0 < penalty <= 2:
        raise InvalidArgument(
            f"Validation: Repetition penalty must be between 0 and 2, got {penalty:g}",
            field="nvext.repetition_penalty",
        )
    one, other = nvext.greedy_sampling, nvext.greed_sampling
    if one is not None and other is not None and one != other:
        raise InvalidArgument(
            "Validation: `nvext.greedy_sampling` and `nvext.greed_sampling` are two spellings of one field "
            "and were given different values",
            field="nvext.greedy_sampling",
        )
