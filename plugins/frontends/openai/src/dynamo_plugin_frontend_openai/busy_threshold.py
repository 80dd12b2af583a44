"""``/busy_threshold``: read and change the busy thresholds at run time. For operators."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from aiohttp import web
from dynamo_core import (
    THRESHOLDS,
    DynamoError,
    HttpFault,
    HttpRoute,
    ListenerName,
    Problem,
    Thresholds,
    check_changes,
)
from dynamo_core.errors import InvalidArgument, ModelNotFound, Unavailable
from dynamo_core.protocol import UNREADABLE, truncated
from dynamo_generation.bodies.bounds import INLINE
from dynamo_generation.bodies.reading import read_bytes
from dynamo_http import error_response
from msgspec import UNSET, UnsetType

if TYPE_CHECKING:
    from dynamo_core import FrontendServices, ThresholdControl

PATH = "/busy_threshold"
#: Seconds in which the store must have taken what a request says.
DEADLINE = 10.0

_FRACTION = "active_prefill_tokens_threshold_frac"
_ARM = "Busy thresholds are not in use: start with --admission-control token-capacity to arm them"


class ThresholdRequest(msgspec.Struct, forbid_unknown_fields=True):
    """New thresholds of a model. Absent fields stay as they are, null switches a threshold off."""

    model: Annotated[str, msgspec.Meta(max_length=256)]
    active_decode_blocks_threshold: float | UnsetType | None = UNSET
    active_prefill_tokens_threshold: int | UnsetType | None = UNSET
    active_prefill_tokens_threshold_frac: float | UnsetType | None = UNSET

    def changes(self) -> dict[str, Any]:
        """Return what is not left out."""
        given = {name: getattr(self, name) for name in THRESHOLDS}
        return {name: value for name, value in given.items() if value is not UNSET}


class ThresholdEntry(msgspec.Struct):
    """The thresholds of a model."""

    model: str
    active_decode_blocks_threshold: float | None
    active_prefill_tokens_threshold: int | None
    active_prefill_tokens_threshold_frac: float | UnsetType | None = UNSET


class ThresholdList(msgspec.Struct):
    """The thresholds of all models that have any."""

    thresholds: list[ThresholdEntry]


class PlainError(msgspec.Struct):
    """An error as text."""

    error: str


_decoder = msgspec.json.Decoder(ThresholdRequest)


class BusyThresholds:
    """The routes. Values hold for all frontends, since they are kept in discovery."""

    def __init__(self, services: FrontendServices, control: ThresholdControl) -> None:
        self._models = services.models
        self._control = control

    def routes(self) -> Iterable[HttpRoute]:
        """Return all of them, on the operators' listener."""
        admin = ListenerName.ADMIN
        return [
            HttpRoute(method, path, handler, summary, admin, respond_error)
            for method, path, handler, summary in (
                ("GET", PATH, self.list, "When workers count as busy, by model"),
                ("POST", PATH, self.post, "Sets when the workers of a model count as busy"),
                ("DELETE", f"{PATH}/{{model:.+}}", self.delete, "Takes back what was set for a model"),
            )
        ]

    async def list(self, http: web.Request) -> web.Response:
        """Return the thresholds of all models that have any; none where no admission plugin goes by them."""
        found: list[dict[str, Any]] = []
        if self._control.armed:
            touched = set(self._control.changed_models())
            for model in self._models.list():
                own = self._control.of(model.name)
                if own or model.name in touched:
                    found.append(_entry(model.name, own))
        return _json({"thresholds": found})

    async def post(self, http: web.Request) -> web.Response:
        """Set some thresholds of a model, or none: then it tells them."""
        asked = await _read(http)
        changes = asked.changes()
        try:
            check_changes(changes)
        except ValueError as error:
            raise InvalidArgument(str(error)) from error
        self._check_armed()
        if changes and all(model.name != asked.model for model in self._models.list()):
            raise ModelNotFound(
                f"Model '{truncated(asked.model)}' not found. Thresholds can only be set for discovered models."
            )
        own = await _written(self._control.change(asked.model, changes)) if changes else None
        return _json(_whole(asked.model, own or self._control.of(asked.model)))

    async def delete(self, http: web.Request) -> web.Response:
        """Take back what was set for a model, which need not be there any more."""
        model = http.match_info["model"]
        self._check_armed()
        return _json(_whole(model, await _written(self._control.reset(model))))

    def _check_armed(self) -> None:
        if not self._control.armed:
            raise HttpFault(409, _ARM)


async def _read(http: web.Request) -> ThresholdRequest:
    body = await read_bytes(http)
    try:
        if len(body) > INLINE:
            raise HttpFault(413, f"Request body exceeds the {INLINE} bytes that thresholds may take")
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        text = f"Failed to deserialize the JSON body into the target type: {error}"
        raise HttpFault(422, text) from error
    except UNREADABLE as error:
        raise InvalidArgument(f"Failed to parse the request body as JSON: {error}") from error


async def _written(change: Any) -> Thresholds:
    """Return what a change of the store gives, or why it could not be made."""
    try:
        async with asyncio.timeout(DEADLINE):
            thresholds: Thresholds = await change
    except (DynamoError, TimeoutError) as error:
        raise Unavailable("The store of shared values cannot be written now; nothing is lost, try again") from error
    except ValueError as error:
        raise InvalidArgument(str(error)) from error
    return thresholds


def _entry(model: str, own: Thresholds) -> dict[str, Any]:
    """Return a model as a list shows it: the fraction only where it is set."""
    entry = _whole(model, own)
    if entry[_FRACTION] is None:
        del entry[_FRACTION]
    return entry


def _whole(model: str, own: Thresholds) -> dict[str, Any]:
    values = {name: getattr(own, name) for name in THRESHOLDS}
    return {"model": model, **values}


def _json(value: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def respond_error(problem: Problem) -> web.Response:
    """Return an error as these routes word it."""
    return error_response(problem, msgspec.json.encode(PlainError(problem.message)))
