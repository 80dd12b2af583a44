"""Sessions of the dashboard: a cookie stands for the token given at the login."""

from __future__ import annotations

import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from ipaddress import IPv4Address, ip_address, ip_network
from typing import Final

VIEWER, OPERATOR = "viewer", "operator"

#: Sessions that are kept; the one that was used longest ago makes room.
SESSIONS: Final = 1000
#: Addresses whose wrong tokens are counted.
ADDRESSES: Final = 1024
#: Wrong tokens of an address before it has to wait, a second first and then twice as long each time.
FREE: Final = 5
#: Seconds of the longest wait, and without a wrong token until an address begins anew.
LONGEST, FORGOTTEN = 60.0, 600.0


@dataclass(frozen=True, slots=True)
class Session:
    """A browser that is logged in. `holds` says whether its login still opens."""

    role: str
    expires: float
    holds: Callable[[], bool]
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    #: What the audit log calls it.
    name: str = field(default_factory=lambda: secrets.token_hex(4))

    @property
    def title(self) -> str:
        """Role and name, for the audit log."""
        return f"{self.role}:{self.name}"


class Sessions:
    """The sessions of one process, in its memory: a restart ends all of them."""

    def __init__(self, lifetime: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`lifetime` is in seconds."""
        self._lifetime = lifetime
        self._clock = clock
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()

    def begin(self, role: str, holds: Callable[[], bool] = lambda: True) -> tuple[str, Session]:
        """Return a new session, and the text that its cookie holds."""
        cookie = secrets.token_urlsafe(32)
        session = Session(role, self._clock() + self._lifetime, holds)
        self._sessions[_digest(cookie)] = session
        if len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)
        return cookie, session

    def find(self, cookie: str | None) -> Session | None:
        """Return the session of a cookie, unless it is over."""
        digest = _digest(cookie or "")
        session = self._sessions.get(digest)
        if session is None:
            return None
        if self._clock() >= session.expires or not session.holds():
            del self._sessions[digest]
            return None
        self._sessions.move_to_end(digest)
        return session

    def end(self, cookie: str | None) -> None:
        """End a session, if there is one."""
        self._sessions.pop(_digest(cookie or ""), None)


@dataclass(slots=True)
class _Failures:
    """The wrong tokens of one address."""

    count: int = 0
    latest: float = 0.0
    until: float = 0.0


class FailedLogins:
    """Wrong tokens by the address of the client: one that goes on has to wait, longer each time.

    A right token is never made to wait, so that no client can lock another one out. The table is bounded; the address
    that failed longest ago makes room.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, _Failures] = OrderedDict()

    def add(self, address: str | None) -> float:
        """Count a wrong token, and return the seconds that its address still has to wait; 0 if it had not to."""
        now, network = self._clock(), _network(address)
        failures = self._failures.setdefault(network, _Failures())
        self._failures.move_to_end(network)
        if len(self._failures) > ADDRESSES:
            self._failures.popitem(last=False)
        if failures.until > now:
            return failures.until - now
        failures.count = 1 if now - failures.latest > FORGOTTEN else failures.count + 1
        failures.latest = now
        if failures.count >= FREE:
            failures.until = now + min(LONGEST, 2.0 ** min(failures.count - FREE, LONGEST))
        return 0.0


def _network(address: str | None) -> str:
    """Return the address that counts: of IPv6 the network of 64 bits, since a host may use all of it."""
    try:
        known = ip_address(address or "")
    except ValueError:
        return ""
    if isinstance(known, IPv4Address) or known.ipv4_mapped:
        return str(known)
    return str(ip_network((known, 64), strict=False))


def same(one: str, other: str) -> bool:
    """Return whether two secrets are the same, in a time that does not tell how much of them is."""
    return hmac.compare_digest(_digest(one), _digest(other))


def _digest(text: str) -> bytes:
    # A header may hold bytes that are no text; they come as surrogates.
    return sha256(text.encode("utf-8", "surrogateescape")).digest()
