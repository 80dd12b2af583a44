"""What the service refuses, and with which status."""

from __future__ import annotations

from typing import ClassVar

from dynamo_core import HttpFault


class Refusal(HttpFault):
    """A call that is refused; the message is meant for the caller."""

    STATUS: ClassVar[int] = 400

    def __init__(self, message: str) -> None:
        super().__init__(self.STATUS, message)


class Malformed(Refusal):
    """What was sent makes no sense."""


class Unknown(Refusal):
    """What is meant is not there."""

    STATUS = 404


class Conflict(Refusal):
    """It contradicts what is there."""

    STATUS = 409


class WrongContentType(Refusal):
    """The body says that it is something else."""

    STATUS = 415


class WrongSchema(Refusal):
    """The body is JSON, but not what is expected here."""

    STATUS = 422
