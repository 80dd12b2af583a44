"""How often something is done, and how the processes of a system are kept from doing it all at once. In seconds."""

from __future__ import annotations

import random


def spread(seconds: float, least: float = 0.5, most: float = 1.5) -> float:
    """A random time between two multiples of `seconds`."""
    # No cryptography: it only spreads the processes over the time.
    return seconds * (least + (most - least) * random.random())  # noqa: S311


def heartbeat(ttl: float, setting: float | None) -> float:
    """The time between two heartbeats of a lease; `setting` is the configured one, None for a third of the ttl."""
    return min(ttl / 3 if setting is None else setting, ttl / 2)


def check_ttl(ttl: float) -> None:
    """Refuses what no lease can live.

    Raises:
        ValueError: it is not above 0.
    """
    if not ttl > 0:
        raise ValueError("a lease needs a ttl of more than 0 seconds")


def check_times(ttl: float, parts: int, /, **times: float | None) -> None:
    """Checks settings that must be at most a part of `ttl`: a half if `parts` is 2, a third if it is 3.

    Raises:
        ValueError: names the setting that is more.
    """
    for name, seconds in times.items():
        if seconds is not None and seconds > ttl / parts:
            part = {2: "half", 3: "a third"}[parts]
            raise ValueError(f"{name} ({seconds:g} s) must be at most {part} of ttl ({ttl:g} s)")
