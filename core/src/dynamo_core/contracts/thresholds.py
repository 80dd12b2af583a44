"""Busy thresholds over the load of a worker's ranks, and the views to read and change them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

#: The assumed number of tokens that an engine computes in one step if its card does not say.
UNKNOWN_BATCH = 10_000_000

DECODE_BLOCKS = "active_decode_blocks_threshold"
PREFILL_TOKENS = "active_prefill_tokens_threshold"
PREFILL_FRACTION = "active_prefill_tokens_threshold_frac"
#: The names of the thresholds, as the config file and the API have them.
THRESHOLDS = (DECODE_BLOCKS, PREFILL_TOKENS, PREFILL_FRACTION)

#: Some thresholds by name; None switches one off.
Changes: TypeAlias = Mapping[str, float | int | None]


@dataclass(frozen=True, slots=True)
class RankLoad:
    """The load and the capacity of one data-parallel rank; None where that is not known.

    `active_decode_blocks` are KV blocks in use: those that the worker reported last and those placed since. While
    prompts wait for room the number may exceed the capacity.
    """

    active_decode_blocks: int = 0
    kv_total_blocks: int | None = None
    active_prefill_tokens: int = 0
    max_num_batched_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The bounds above which a rank is busy. None: no bound of that kind."""

    #: Share of its KV blocks, 0 to 1.
    active_decode_blocks_threshold: float | None = None
    #: Prompt tokens that are yet to be computed.
    active_prefill_tokens_threshold: int | None = None
    #: The same, as a multiple of what the engine computes in one step.
    active_prefill_tokens_threshold_frac: float | None = None

    def __bool__(self) -> bool:
        """Return whether any is set."""
        return (
            self.active_decode_blocks_threshold is not None
            or self.active_prefill_tokens_threshold is not None
            or self.active_prefill_tokens_threshold_frac is not None
        )

    def exceeded(self, rank: RankLoad) -> bool:
        """Return whether a rank is above one of the bounds. A rank at the bound is not."""
        share, total = self.active_decode_blocks_threshold, rank.kv_total_blocks
        # The fill level of a cache of unknown size is unknown.
        if share is not None and total is not None and total > 0 and rank.active_decode_blocks / total > share:
            return True
        tokens = self.active_prefill_tokens_threshold
        if tokens is not None and rank.active_prefill_tokens > tokens:
            return True
        fraction = self.active_prefill_tokens_threshold_frac
        if fraction is None:
            return False
        batch = UNKNOWN_BATCH if rank.max_num_batched_tokens is None else rank.max_num_batched_tokens
        # Not rounded: the product of two large numbers may be infinite.
        return rank.active_prefill_tokens > fraction * batch

    def busy(self, ranks: Sequence[RankLoad]) -> bool:
        """Return whether a worker is busy: all its ranks are. A worker without known ranks is not."""
        return bool(self) and bool(ranks) and all(self.exceeded(rank) for rank in ranks)

    def with_changes(self, changes: Changes) -> Thresholds:
        """Return a copy with some bounds replaced. The changes have been checked."""
        values = {name: changes[name] if name in changes else getattr(self, name) for name in THRESHOLDS}
        return Thresholds(**values)  # type: ignore[arg-type]


def check_changes(changes: Changes) -> None:
    """Check that thresholds are in range.

    Raises:
        ValueError: naming the first that is not.
    """
    share = changes.get(DECODE_BLOCKS)
    if share is not None and not 0.0 <= share <= 1.0:
        raise ValueError(f"{DECODE_BLOCKS} must be between 0.0 and 1.0, got {share}")
    tokens = changes.get(PREFILL_TOKENS)
    if tokens is not None and tokens < 0:
        raise ValueError(f"{PREFILL_TOKENS} must be at least 0, got {tokens}")
    fraction = changes.get(PREFILL_FRACTION)
    if fraction is not None and not 0.0 <= fraction < math.inf:
        raise ValueError(f"{PREFILL_FRACTION} must be a finite value greater than or equal to 0.0, got {fraction}")


class ThresholdView(Protocol):
    """The thresholds in force."""

    def of(self, model: str) -> Thresholds:
        """Return those of a model."""


class ThresholdControl(ThresholdView, Protocol):
    """The thresholds with the means to change them."""

    @property
    def armed(self) -> bool:
        """Whether the admission plugin goes by them."""

    def changed_models(self) -> Iterable[str]:
        """Return models with thresholds set through `change`, whether they are registered or not."""

    async def change(self, model: str, changes: Changes) -> Thresholds:
        """Set some of a model's thresholds for all frontends and return all of them. The others follow within 1 s.

        Raises:
            ValueError: one is out of range.
            DynamoError: the store cannot be written.
        """

    async def reset(self, model: str) -> Thresholds:
        """Drop the thresholds set through `change`: the configuration counts again.

        Raises:
            DynamoError: the store cannot be written.
        """


class _NoThresholds:
    """Thresholds without any bound."""

    def of(self, model: str) -> Thresholds:
        return _NONE


_NONE = Thresholds()
#: The default of services without thresholds.
NO_THRESHOLDS: ThresholdView = _NoThresholds()
