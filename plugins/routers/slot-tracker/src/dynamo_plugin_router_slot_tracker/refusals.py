"""What the service refuses, and with which status."""

from __future__ import annotations

from typing import ClassVar


class Refusal(Exception):
    """A call that is refused; the text is meant for the caller."""

    status: ClassVar[int] = 400

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class Malformed(Refusal):
    """What was sent makes no sense."""


class Unknown(Refusal):
    """What is meant is not there."""

    status = 404


class Conflict(Refusal):
    """It contradicts what is there."""

    status = 409


class WrongContentType(Refusal):
    """The body says that it is something else."""

    status = 415


class WrongSchema(Refusal):
    """The body is JSON, but not what is expected here."""

    status = 422


class Unusable(Refusal):
    """It cannot be done now."""

    status = 503
