"""The errors of the service and their statuses."""

from __future__ import annotations

from typing import ClassVar

from dynamo_core import HttpFault


class Refusal(HttpFault):
    """A call that is refused; the message is meant for the caller."""

    STATUS: ClassVar[int] = 400
    #: Seconds after which the call may be repeated, if that is of use.
    RETRY_AFTER: ClassVar[int | None] = None

    def __init__(self, message: str) -> None:
        super().__init__(self.STATUS, message)


class Malformed(Refusal):
    """The body makes no sense."""


class Unknown(Refusal):
    """The named object does not exist."""

    STATUS = 404


class Conflict(Refusal):
    """The request contradicts the state."""

    STATUS = 409


class WrongContentType(Refusal):
    """The body says that it is something else."""

    STATUS = 415


class WrongSchema(Refusal):
    """The body is JSON, but of another schema."""

    STATUS = 422


class Full(Refusal):
    """There is no room for another request until others are freed or expire."""

    STATUS = 429
    RETRY_AFTER = 1
