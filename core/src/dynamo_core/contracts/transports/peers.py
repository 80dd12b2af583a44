"""Calls between the frontends of one deployment, so that each of them can speak for all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from dynamo_core.protocol.records import FrontendRecord

#: The largest payload of a call and of its reply, in bytes of MessagePack.
MAX_PAYLOAD: Final = 16 * 1024 * 1024

#: Answers a call of another frontend, or of this one. Payload and result are plain values: whatever MessagePack holds.
PeerHandler: TypeAlias = Callable[[Any], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class PeerReplies:
    """The replies of a deployment's frontends to one call, by frontend id.

    Each of `frontends` is in `replies` or in `missing`, which says in a line why there is no reply.
    """

    frontends: Sequence[FrontendRecord]
    replies: Mapping[int, Any]
    missing: Mapping[int, str]


class FrontendPeers(Protocol):
    """The frontends of this deployment, this one among them, and calls of all of them."""

    @property
    def own(self) -> FrontendRecord:
        """This frontend. Its id changes when its lease was lost."""

    def frontends(self) -> Sequence[FrontendRecord]:
        """Return this frontend and those that discovery shows, by id. With a transport of one process it is alone."""

    def serve(self, name: str, handler: PeerHandler) -> None:
        """Answer calls named `name` until the extension is closed. Extensions do not see the names of others.

        Raises:
            ValueError: the extension serves this name already.
        """

    async def call_all(self, name: str, payload: Any = None, *, timeout: float) -> PeerReplies:
        """Call `name` in every frontend at the same time. Return within `timeout` seconds, also if one is silent.

        Raises:
            ValueError: `payload` is no plain value, or larger than `MAX_PAYLOAD`.
        """
