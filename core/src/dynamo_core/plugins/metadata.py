"""What the installed distributions offer, read from their metadata alone: nothing is imported."""

from __future__ import annotations

from dataclasses import dataclass

from importlib_metadata import EntryPoint, entry_points

from dynamo_core.contracts.plugin import KINDS

GROUP = "dynamo"


@dataclass(frozen=True, slots=True)
class Offer:
    """One entry point of the group ``dynamo``.

    `kind` is empty if the entry point's name does not begin with a known kind; `name` is then the whole name.
    `target` is what the entry point names, which should be a module.
    """

    kind: str
    name: str
    distribution: str
    version: str
    target: str

    @property
    def origin(self) -> str:
        """The distribution and its version, for messages."""
        return f"{self.distribution} {self.version}"


def find_offers() -> list[Offer]:
    """All entry points of the group, by kind, name and distribution.

    A distribution that lies twice on the path counts once, where it is found first, as for an import.
    """
    offers = {_offer(entry) for entry in entry_points(group=GROUP)}
    return sorted(offers, key=lambda offer: (offer.kind, offer.name, offer.distribution))


def _offer(entry: EntryPoint) -> Offer:
    kind, dash, name = entry.name.partition("-")
    if kind not in KINDS or not dash or not name:
        kind, name = "", entry.name
    distribution, version = ("unknown", "unknown") if entry.dist is None else (entry.dist.name, entry.dist.version)
    return Offer(kind, name, distribution, version, entry.value)
