"""The principal and the id of a request, for handlers."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

from aiohttp import web
from dynamo_core import Principal
from dynamo_core.contracts.requests.principal import ANONYMOUS
from dynamo_core.protocol.ids import client_request_id, new_request_id

from dynamo_http.client_headers import CLIENT_HEADERS

#: The key under which the listener stores the principal of a request.
PRINCIPAL = web.RequestKey("dynamo.principal", Principal)
_REQUEST_ID = web.RequestKey("dynamo.request_id", str)
#: Seconds that the client waits for the whole answer, or for its next bytes; and the number of its earlier attempts.
_TIMEOUT, _READ_TIMEOUT, _RETRIES = "x-stainless-timeout", "x-stainless-read-timeout", "x-stainless-retry-count"


def principal_of(http: web.Request) -> Principal:
    """Return the principal, as the listener found it before it called the handler.

    Anonymous where no keys are configured. A frontend passes it to the model, and treats a model that it does not allow
    as one that does not exist. `deadline` and `retries` hold the timeout and the number of earlier attempts that
    clients such as the official SDKs send; `session` and `headers` what the headers say that the settings name.

    Raises:
        InvalidArgument: one of those headers holds what cannot be passed on.
    """
    principal: Principal = http.get(PRINCIPAL, ANONYMOUS)
    headers = http.headers
    named = http.get(CLIENT_HEADERS)
    if named is not None:
        principal = named.of(http, principal)
    seconds = _number(headers.get(_TIMEOUT) or headers.get(_READ_TIMEOUT))
    retries = int(_number(headers.get(_RETRIES)) or 0)
    if seconds is not None:
        principal = replace(principal, deadline=asyncio.get_running_loop().time() + seconds)
    return replace(principal, retries=retries) if retries else principal


def request_id_of(http: web.BaseRequest) -> str:
    """Return the ``x-request-id`` of the answer: the client's own id of the request, else one of ours.

    The listener writes it; a handler that writes its answer past aiohttp has to do so itself.
    """
    known: str | None = http.get(_REQUEST_ID)
    if known is None:
        known = http[_REQUEST_ID] = client_request_id(http.headers.get("x-request-id")) or new_request_id()
    return known


def set_request_id(http: web.BaseRequest, request_id: str) -> None:
    """Set the id that the request is counted under. The answer carries it unless the client sent an id of its own."""
    http[_REQUEST_ID] = client_request_id(http.headers.get("x-request-id")) or request_id


def _number(value: str | None) -> float | None:
    """Return the value of a header, if it is a number from 0 on."""
    try:
        number = float(value or "")
    except ValueError:
        return None
    return number if 0.0 <= number < math.inf else None
