"""The interval of heartbeats, and the checks of settings that depend on the ttl. In seconds."""

from __future__ import annotations


def heartbeat_interval(ttl: float, setting: float | None) -> float:
    """Return the time between two heartbeats of a lease.

    `setting` is the configured one, None for a third of the ttl.
    """
    return min(ttl / 3 if setting is None else setting, ttl / 2)


def check_ttl(ttl: float) -> None:
    """Check the ttl of a lease.

    Raises:
        ValueError: it is not above 0.
    """
    if not ttl > 0:
        raise ValueError("a lease needs a ttl of more than 0 seconds")


def check_times(ttl: float, parts: int, /, **times: float | None) -> None:
    """Check settings that must be at most a part of `ttl`: a half if `parts` is 2, a third if it is 3.

    Raises:
        ValueError: names the setting that is more.
    """
    for name, seconds in times.items():
        if seconds is not None and seconds > ttl / parts:
            part = {2: "half", 3: "a third"}[parts]
            raise ValueError(f"{name} ({seconds:g} s) must be at most {part} of ttl ({ttl:g} s)")
