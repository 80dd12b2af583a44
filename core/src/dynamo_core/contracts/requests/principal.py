"""The identity behind a client request, from its API key and its body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Principal:
    """The identity behind a client request. A higher `priority` goes first.

    `deadline` is in seconds of the event loop's clock; None if the client sets none. `key_id` names the API key; it is
    empty where no keys are configured. `models` are the models that the key covers; None covers all. `retries` is the
    number of earlier attempts that the client reports.

    The client alone vouches for `user`, its end user, `session`, and `headers`, the request headers that
    `http.forward_headers` lists, by lower-case names. They are empty if it sends none, and a repr leaves them out.
    """

    key_id: str = ""
    tenant: str = "default"
    priority: int = 0
    deadline: float | None = None
    models: frozenset[str] | None = None
    retries: int = 0
    user: str = field(default="", repr=False)
    session: str = field(default="", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)

    def allows(self, model: str) -> bool:
        """Return whether the key covers this model.

        A model that it does not cover is treated as one that does not exist.
        """
        return self.models is None or model in self.models

    def with_end_user(self, *, user: str = "", session: str = "") -> Principal:
        """Return this principal with the end user and the session that a request names.

        An empty value changes nothing.
        """
        user, session = user or self.user, session or self.session
        if user == self.user and session == self.session:
            return self
        return replace(self, user=user, session=session)


#: The principal of a request without a key.
ANONYMOUS = Principal()
