"""The mapping of a server's errors to those of this framework, with limits on what clients see."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from dynamo_core import BackendError, DynamoError
from dynamo_core.errors import NotSupported, WorkerOverloaded
from dynamo_core.protocol import Unreadable, read

#: Characters of a server's message that a client is shown.
LONGEST = 500

#: The server works, and has no room: others may have.
_BUSY = frozenset({429, 503, 529})
#: The server, or a proxy before it, does not work now; others may.
_BROKEN = frozenset({408, 409, 425, 502, 504})
#: The server rejects this worker, which is no fault of the client.
_CLOSED = frozenset({401, 402, 403, 407})
#: The server does not offer this function.
_ABSENT = frozenset({405, 501})

_bodies = msgspec.json.Decoder()
_BLANKS = re.compile(r"\s+")
#: The scheme is bounded: a long word without an address would be gone through from each of its letters.
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]{0,30}://\S+", re.IGNORECASE)
_PATH = re.compile(r"(?<![\w.])/(?:[\w.@+-]+/)+[\w.@+-]*")


def status_error(status: int, error: Any, names: Mapping[str, str]) -> DynamoError:
    """Return the error for an HTTP status and what was found in the body as its ``error``.

    `names` are words of the server that clients are not to see, such as its own name of the model, and what to say
    instead.
    """
    message = _message_of(error)
    where = f"the server answered {status}: {message or 'without a message'}"
    if status in _BUSY:
        return WorkerOverloaded(where)
    if status in _BROKEN:
        return BackendError.Disconnected(where)
    if status in _CLOSED:
        return BackendError.CannotConnect(f"{where} (see `api_key` of this worker)")
    if status in _ABSENT or (status == 404 and not _is_about_the_model(error, message)):
        return NotSupported("The server of this model does not offer that")
    if status == 404:
        return BackendError.CannotConnect(where)
    if 400 <= status < 500:
        param = error.get("param") if isinstance(error, dict) else None
        field = param if isinstance(param, str) and re.fullmatch(r"[\w.\[\]]{1,100}", param) else None
        message = sanitized(message, names) if message else f"The server of this model refused the request ({status})"
        return BackendError.InvalidArgument(message, field=field)
    return BackendError.Unknown(where)


def stream_error(error: Any, names: Mapping[str, str]) -> DynamoError:
    """Return the error for an ``error`` object in a stream; its ``code`` may be an HTTP status."""
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    return status_error(status, error, names)


def error_object(body: bytes) -> Any:
    """Return the ``error`` of a body, or the body itself if it is a message; None if it is neither."""
    try:
        whole = read(_bodies, body)
    except Unreadable:
        return None
    if not isinstance(whole, dict):
        return None
    return whole.get("error") or whole


def sanitized(message: str, names: Mapping[str, str]) -> str:
    """Return a server's message as clients may see it: one line without addresses, paths and the server's own names."""
    for name in sorted(names, key=len, reverse=True):
        message = message.replace(name, names[name])
    message = _PATH.sub("…", _ADDRESS.sub("…", message))
    message = "".join(mark for mark in _BLANKS.sub(" ", message).strip() if mark.isprintable())
    return message if len(message) <= LONGEST else message[: LONGEST - 1] + "…"


def _message_of(error: Any) -> str:
    if isinstance(error, str):
        return error
    if isinstance(error, dict):
        for name in ("message", "detail", "error"):
            if isinstance(error.get(name), str):
                text: str = error[name]
                return text
    return ""


def _is_about_the_model(error: Any, message: str) -> bool:
    about = isinstance(error, dict) and (error.get("param") == "model" or error.get("code") == "model_not_found")
    return about or "model" in message.lower()
