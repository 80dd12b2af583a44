"""The errors that only this API has, and how it tells what it does not tell the client."""

from __future__ import annotations

import logging

from dynamo_core import DynamoError, Problem
from dynamo_core.errors import INTERNAL
from dynamo_core.http import error_body
from dynamo_core.protocol import shown

log = logging.getLogger(__name__)


class TemplateFault(DynamoError):
    """A chat template took too long, or too much memory, and was stopped. The message is for the client too."""

    public = True


class BrokenCall(DynamoError):
    """The model began a call of a tool in a stream, and did not end it as a call: a client must not carry it out."""

    public = True
    code = "invalid_tool_call"

    def __init__(self, name: str, choice: int) -> None:
        super().__init__(f"The model broke off its call of tool {shown(name)!r}: the arguments are no JSON object")
        #: The choice of a stream that cannot be gone on with.
        self.choice = choice


def error_event(problem: Problem, error: BaseException) -> bytes:
    """The last item of a stream that broke."""
    body = error_body(problem)
    if isinstance(error, BrokenCall):
        # As others have it: a chunk whose choice has ended with an error.
        body = b'%b,"choices":[{"index":%d,"delta":{},"finish_reason":"error"}]}' % (body[:-1], error.choice)
    return b"data: %b\n\n" % body


def report(problem: Problem, error: BaseException, request_id: str) -> None:
    """Logs what the client is not told. Faults of the client are no news, and that a worker was lost is logged where
    it was noticed."""
    if isinstance(error, BrokenCall):
        log.warning("request %s failed: %s", request_id, error)
    elif problem.metric == INTERNAL:
        log.error("request %s failed: %s", request_id, error, exc_info=error)
    elif problem.metric == "response_timeout":
        log.warning("request %s was given up: %s", request_id, error)
