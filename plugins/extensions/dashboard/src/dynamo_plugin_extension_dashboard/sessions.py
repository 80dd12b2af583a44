"""Who is logged in: browsers show a cookie, which stands for the token that was given at the login."""

from __future__ import annotations

import hmac
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

VIEWER, OPERATOR = "viewer", "operator"

#: Sessions that are kept; the one that was used longest ago makes room.
SESSIONS: Final = 1000
#: Logins with a wrong token within `WINDOW` seconds, after which all have to wait.
FAILURES: Final = 10
WINDOW: Final = 60.0


@dataclass(frozen=True, slots=True)
class Session:
    """A browser that is logged in. `holds` says whether what it showed at its login still opens."""

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
        self._failures: deque[float] = deque(maxlen=FAILURES)

    def begin(self, role: str, holds: Callable[[], bool] = lambda: True) -> tuple[str, Session]:
        """A new session, and the text that its cookie holds."""
        cookie = secrets.token_urlsafe(32)
        session = Session(role, self._clock() + self._lifetime, holds)
        self._sessions[_digest(cookie)] = session
        if len(self._sessions) > SESSIONS:
            self._sessions.popitem(last=False)
        return cookie, session

    def find(self, cookie: str | None) -> Session | None:
        """The session of a cookie, unless it is over."""
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
        """Ends a session, if there is one."""
        self._sessions.pop(_digest(cookie or ""), None)

    def failed(self) -> None:
        """Counts a login with a wrong token."""
        self._failures.append(self._clock())

    @property
    def wait(self) -> float:
        """Seconds before the next login is looked at; 0: none."""
        full = len(self._failures) == FAILURES
        return max(0.0, self._failures[0] + WINDOW - self._clock()) if full else 0.0


def same(one: str, other: str) -> bool:
    """Whether two secrets are the same, in a time that does not tell how much of them is."""
    return hmac.compare_digest(_digest(one), _digest(other))


def _digest(text: str) -> bytes:
    # A header may hold bytes that are no text; they come as surrogates.
    return sha256(text.encode("utf-8", "surrogateescape")).digest()
