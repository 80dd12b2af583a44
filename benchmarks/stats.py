"""Order statistics of small samples. Pure functions, no units of their own."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some rounds, and how far the rounds lay apart."""

    median: float
    low: float
    high: float


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of an ascending sequence lies, interpolated between neighbours.

    Raise ValueError for an empty sequence or a share outside 0 to 1.
    """
    if not ordered:
        raise ValueError("a percentile needs at least one value")
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share must be between 0 and 1, not {share}")
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(values: Iterable[float | None]) -> Spread | None:
    """Return median, smallest and largest of the values that are there; None when none is."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return None
    return Spread(percentile(ordered, 0.5), ordered[0], ordered[-1])


def ratio(value: float | None, base: float | None) -> float | None:
    """Return `value / base`; None where either is missing or the base is zero."""
    if value is None or not base:
        return None
    return value / base
