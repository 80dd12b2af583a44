"""Errors of a request: the last event of a broken stream, and its log line."""

from __future__ import annotations

import logging

from dynamo_core import Problem
from dynamo_core.errors import INTERNAL
from dynamo_http import error_body

log = logging.getLogger(__name__)


def error_event(problem: Problem) -> bytes:
    """Return the last item of a stream that broke."""
    return b"data: %b\n\n" % error_body(problem)


def report(problem: Problem, error: BaseException, request_id: str) -> None:
    """Log what the client is not told.

    Faults of the client are no news, and that a worker was lost is logged where it was noticed.
    """
    if problem.metric == INTERNAL:
        log.error("request %s failed: %s", request_id, error, exc_info=error)
    elif problem.metric == "response_timeout":
        log.warning("request %s was given up: %s", request_id, error)
