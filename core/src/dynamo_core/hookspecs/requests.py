"""Hooks that announce what happens to client requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_core.hookspecs.markers import hookspec

if TYPE_CHECKING:
    from dynamo_core.protocol.records import RequestRecord


@hookspec
def dynamo_request_finished(record: RequestRecord) -> None:
    """A client request has ended, well or badly. Called once per request that reached a model, after all it held was
    released; the returned value is ignored; an exception is logged and changes nothing. The access log is the built-in
    listener."""
