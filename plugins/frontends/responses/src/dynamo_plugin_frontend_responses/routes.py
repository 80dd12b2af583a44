"""The routes of stored responses and of conversations. No model is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from aiohttp import web
from dynamo_core import HttpFault, HttpRoute
from dynamo_core.errors import InvalidArgument
from dynamo_generation.answers.render import encode
from dynamo_generation.bodies.decode import to_struct
from dynamo_generation.bodies.reading import read_body
from dynamo_generation.endpoints.openapi import Operation
from dynamo_generation.requests import fields
from dynamo_generation.requests.generation_request import invalid
from dynamo_http import principal_of

from dynamo_plugin_frontend_responses import schemas
from dynamo_plugin_frontend_responses.memory import owner_of
from dynamo_plugin_frontend_responses.requests import ResponseItem, check_items

if TYPE_CHECKING:
    from dynamo_plugin_frontend_responses.memory import ResponseMemory
    from dynamo_plugin_frontend_responses.records import Item

BodyT = TypeVar("BodyT", bound=msgspec.Struct)

#: Items of a page: at most, and if nothing is said; and items that one request may add.
_MOST, _USUAL, _ADDED = 100, 20, 20
_NEWEST_FIRST = "desc"


class ConversationRequest(msgspec.Struct, kw_only=True):
    """A new conversation."""

    items: list[ResponseItem] | None = None
    metadata: dict[str, str | None] | None = None


class ConversationUpdate(msgspec.Struct, kw_only=True):
    """Other notes of a conversation."""

    metadata: dict[str, str | None]


class ConversationItems(msgspec.Struct, kw_only=True):
    """Items to be added to a conversation."""

    items: list[ResponseItem]


class StoredResponses:
    """The routes that show and remove stored responses."""

    def __init__(self, memory: ResponseMemory) -> None:
        self._memory = memory

    def operations(self, responses: str, conversations: str) -> list[Operation]:
        """Return the routes below these paths."""
        response, conversation = f"{responses}/{{response_id}}", f"{conversations}/{{conversation_id}}"
        items = f"{conversation}/items"
        make, update, add = ConversationRequest, ConversationUpdate, ConversationItems
        told, page = schemas.ConversationObject, schemas.ItemPage
        return [
            Operation(HttpRoute("GET", response, self.show, "A stored response"), answer=schemas.WholeResponse),
            Operation(HttpRoute("DELETE", response, self.delete, "Removes a response"), answer=schemas.DeletedObject),
            Operation(HttpRoute("GET", f"{response}/input_items", self.inputs, "What it answers to"), answer=page),
            Operation(HttpRoute("POST", f"{response}/cancel", self.cancel, "Refused: no response runs behind")),
            Operation(HttpRoute("POST", conversations, self.begin, "A new conversation"), make, answer=told),
            Operation(HttpRoute("GET", conversation, self.conversation, "A conversation"), answer=told),
            Operation(HttpRoute("POST", conversation, self.describe, "Changes its notes"), update, answer=told),
            Operation(
                HttpRoute("DELETE", conversation, self.end, "Removes a conversation"), answer=schemas.DeletedObject
            ),
            Operation(HttpRoute("GET", items, self.items, "Its items"), answer=page),
            Operation(HttpRoute("POST", items, self.add, "Adds items"), add, answer=page),
            Operation(HttpRoute("GET", f"{items}/{{item_id}}", self.item, "One item"), answer=schemas.StoredItem),
            Operation(HttpRoute("DELETE", f"{items}/{{item_id}}", self.remove, "Removes an item"), answer=told),
        ]

    async def show(self, http: web.Request) -> web.Response:
        """Return a response as it was answered."""
        if http.query.get("stream", "false").lower() not in ("false", "0", ""):
            raise InvalidArgument("Unsupported parameter(s): `stream`. A stored response comes whole", field="stream")
        turn = await self._memory.turn(_owner(http), http.match_info["response_id"])
        return _json(turn.response)

    async def delete(self, http: web.Request) -> web.Response:
        """Remove a response; those that go on from it are left without it."""
        owner, name = _owner(http), http.match_info["response_id"]
        await self._memory.turn(owner, name)
        await self._memory.forget(owner, [name])
        return _json({"id": name, "object": "response", "deleted": True})

    async def cancel(self, http: web.Request) -> web.Response:
        """Refuse: only a response that runs in the background could be cancelled."""
        await self._memory.turn(_owner(http), http.match_info["response_id"])
        raise InvalidArgument("Cannot cancel a synchronous response.")

    async def inputs(self, http: web.Request) -> web.Response:
        """Return the items that the model was shown."""
        owner = _owner(http)
        turn = await self._memory.turn(owner, http.match_info["response_id"])
        return _page(http, await self._memory.input_of(owner, turn))

    async def begin(self, http: web.Request) -> web.Response:
        """Return a new conversation."""
        raw, body = await self._body(http, ConversationRequest)
        items = _checked(raw, body.items)
        return _json((await self._memory.begin_conversation(_owner(http), items, body.metadata or {})).told())

    async def conversation(self, http: web.Request) -> web.Response:
        """Return a conversation, without its items."""
        return _json((await self._memory.conversation(_owner(http), _conversation(http))).told())

    async def describe(self, http: web.Request) -> web.Response:
        """Replace its notes."""
        _, body = await self._body(http, ConversationUpdate)
        return _json((await self._memory.describe(_owner(http), _conversation(http), body.metadata)).told())

    async def end(self, http: web.Request) -> web.Response:
        """Remove a conversation with its items. Responses of it stay."""
        name = _conversation(http)
        await self._memory.end_conversation(_owner(http), name)
        return _json({"id": name, "object": "conversation.deleted", "deleted": True})

    async def items(self, http: web.Request) -> web.Response:
        """Return the items of a conversation."""
        return _page(http, await self._memory.items_of(_owner(http), _conversation(http)))

    async def add(self, http: web.Request) -> web.Response:
        """Add items at the end."""
        raw, body = await self._body(http, ConversationItems)
        return _list(await self._memory.add(_owner(http), _conversation(http), _checked(raw, body.items)), more=False)

    async def item(self, http: web.Request) -> web.Response:
        """Return one item."""
        wanted = http.match_info["item_id"]
        for item in await self._memory.items_of(_owner(http), _conversation(http)):
            if item.get("id") == wanted:
                return _json(item)
        raise HttpFault(404, f"Item with id '{wanted[:80]}' not found in the conversation.")

    async def remove(self, http: web.Request) -> web.Response:
        """Remove one item."""
        item = http.match_info["item_id"]
        return _json((await self._memory.remove(_owner(http), _conversation(http), item)).told())

    async def _body(self, http: web.Request, kind: type[BodyT]) -> tuple[dict[str, Any], BodyT]:
        body = await read_body(http)
        request = await body.run(to_struct, body.raw, kind)
        fields.refuse_fields(body.raw, kind.__struct_fields__, {})
        return body.raw, request


def _owner(http: web.Request) -> str:
    return owner_of(principal_of(http))


def _conversation(http: web.Request) -> str:
    return http.match_info["conversation_id"]


def _checked(raw: dict[str, Any], items: Sequence[ResponseItem] | None) -> list[Item]:
    """Return the items of a body as the client has sent them."""
    if items is None:
        return []
    if len(items) > _ADDED:
        raise invalid(f"At most {_ADDED} items can be added at a time, got {len(items)}", "items")
    check_items(items, "items")
    given: list[Item] = raw["items"]
    return given


def _page(http: web.Request, items: Sequence[Item]) -> web.Response:
    """Return the part of a list that a client asks for; `items` come with the oldest first."""
    query = http.query
    order, text, after = query.get("order", _NEWEST_FIRST), query.get("limit", str(_USUAL)), query.get("after")
    if order not in ("asc", _NEWEST_FIRST):
        raise invalid("order is neither 'asc' nor 'desc'", "order")
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= _MOST):
        raise invalid(f"limit is not a number from 1 to {_MOST}", "limit")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        place = next((at for at, item in enumerate(ordered) if item.get("id") == after), None)
        if place is None:
            raise invalid(f"There is no item with id '{after[:80]}'", "after")
        ordered = ordered[place + 1 :]
    limit = int(text)
    return _list(ordered[:limit], more=len(ordered) > limit)


def _list(items: Sequence[Item], *, more: bool) -> web.Response:
    first, last = (items[0].get("id"), items[-1].get("id")) if items else (None, None)
    return _json({"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": more})


def _json(value: Any) -> web.Response:
    return web.Response(body=encode(value), content_type="application/json")
