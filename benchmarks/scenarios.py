"""The loads that are measured."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Scenario:
    """A closed loop: `clients` connections, each sending its next request when the last one is answered.

    It stops starting requests after `requests` of them or `seconds`, whichever comes first.
    """

    name: str
    title: str
    stream: bool
    clients: int
    max_tokens: int
    requests: int
    seconds: float


_ALL: Final = (
    Scenario("unary-1", "unary, 1 client, 16 tokens", False, 1, 16, 200_000, 3.0),
    Scenario("stream-1", "streams, 1 client, 16 tokens", True, 1, 16, 200_000, 3.0),
    Scenario("unary-32", "unary, 32 clients, 16 tokens", False, 32, 16, 200_000, 3.0),
    Scenario("unary-128", "unary, 128 clients, 16 tokens", False, 128, 16, 200_000, 3.0),
    Scenario("flood", "streams, 64 clients, 256 tokens, as fast as the engine can", True, 64, 256, 20_000, 3.0),
    Scenario("paced", "streams, 64 clients, 256 tokens, a token each 6.4 ms", True, 64, 256, 128, 3.0),
)
SCENARIOS: Final = {scenario.name: scenario for scenario in _ALL}


def chosen(names: str) -> list[Scenario]:
    """Return the scenarios of a comma-separated list. Raise ValueError naming the ones that exist."""
    picked: list[Scenario] = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name not in SCENARIOS:
            raise ValueError(f"no scenario {name!r}; there are {', '.join(SCENARIOS)}")
        picked.append(SCENARIOS[name])
    if not picked:
        raise ValueError(f"no scenario chosen; there are {', '.join(SCENARIOS)}")
    return picked
