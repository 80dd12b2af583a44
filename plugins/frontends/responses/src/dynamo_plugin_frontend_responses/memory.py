"""`ResponseMemory`: earlier responses that requests refer to, and new ones, in a store."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from dynamo_core import HttpFault, Principal, ResponseStore, pauses
from dynamo_core.errors import InvalidArgument, Unavailable
from dynamo_generation.requests.generation_request import invalid

from dynamo_plugin_frontend_responses.config import ResponsesConfig
from dynamo_plugin_frontend_responses.records import (
    CONVERSATION_PREFIX,
    NEAR,
    Batch,
    Conversation,
    Item,
    Turn,
    as_items,
    batch_key,
    decoded,
    encoded,
    is_reference,
    items_of_record,
    record_of_item,
    with_ids,
)
from dynamo_plugin_frontend_responses.render import ID_PREFIX

if TYPE_CHECKING:
    from dynamo_core import FrontendServices

T = TypeVar("T")

log = logging.getLogger(__name__)

_MB = 1024 * 1024
#: Seconds that a write to a conversation may take to which other requests write as well, and its pauses in between.
_CONTENTION = 30.0
_FIRST_PAUSE, _LAST_PAUSE = 0.002, 0.25


class PreviousResponseNotFound(InvalidArgument):
    """The response that a request goes on from is not there."""

    code = "previous_response_not_found"


class StoreAway(Unavailable):
    """The store does not answer, or refuses."""

    code = "response_store_unavailable"


@dataclass(slots=True)
class RecalledInput:
    """The resolved references of a request: the earlier items, and its own with references replaced."""

    owner: str
    stores: bool
    before: list[Item] = field(default_factory=list)
    own: list[Item] = field(default_factory=list)
    #: The own items as they are kept, in which references are still such.
    kept: list[Item] = field(default_factory=list)
    near: list[str] = field(default_factory=list)
    conversation: Conversation | None = None
    #: Bytes that were read for it.
    size: int = 0

    @property
    def refers(self) -> bool:
        """Whether the request is more than its own items."""
        return bool(self.before) or any(is_reference(item) for item in self.kept)

    @property
    def keeps(self) -> bool:
        """Whether something of the answer is written."""
        return self.stores or self.conversation is not None


def owner_of(principal: Principal) -> str:
    """Return whose records those of a caller are: the ids of keys hold no slash."""
    return f"{principal.key_id}/{principal.tenant}"


class ResponseMemory:
    """Reads and writes the records of one store, each call within a deadline."""

    def __init__(self, store: ResponseStore, config: ResponsesConfig, services: FrontendServices) -> None:
        self._store = store
        self._config = config
        #: Held by the request of this process that writes to a conversation, by owner and id.
        self._writing: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._failures = services.metrics.counter(
            f"{services.metrics_prefix}_response_store_failures_total",
            "Failures of the response store: calls (operation get, put, delete), and answers left unstored (pass).",
            ("operation",),
        )

    # What requests refer to.

    async def recall(
        self, raw: Mapping[str, Any], principal: Principal, size: int, *, counts: bool = False
    ) -> RecalledInput:
        """Return what a checked body of `size` bytes refers to. One that only `counts` its tokens keeps nothing.

        Raises:
            InvalidArgument: a response, a conversation or an item is not there, or it is more than may be read.
            StoreAway: it cannot be read now.
        """
        recalled = RecalledInput(owner_of(principal), stores=not counts and raw.get("store") is not False, size=size)
        previous, conversation = raw.get("previous_response_id"), raw.get("conversation")
        if previous is not None and conversation is not None:
            raise invalid("Give either `previous_response_id` or `conversation`, not both", "conversation")
        if recalled.stores or conversation is not None:
            self._check_size(size)
        recalled.kept = as_items(raw["input"])
        if previous is not None:
            await self._recall_chain(recalled, previous)
        elif conversation is not None:
            named = conversation["id"] if isinstance(conversation, dict) else conversation
            recalled.conversation, recalled.before = await self._conversation_items(recalled, named)
            # The answer will be one more.
            self._check_length(recalled.conversation.batches + 1)
        recalled.before = await self._resolved(recalled, recalled.before)
        recalled.own = await self._resolved(recalled, recalled.kept)
        return recalled

    async def turn(self, owner: str, id: str) -> Turn:
        """Return a response that was stored.

        Raises:
            HttpFault: it is not there.
        """
        return (await self._turn(owner, id))[0]

    async def input_of(self, owner: str, turn: Turn) -> list[Item]:
        """Return what the model was shown for a response, the oldest first, without what is not there any more."""
        recalled = RecalledInput(owner, stores=False)
        before = await self._before(recalled, turn, strict=False) or []
        return await self._resolved(recalled, before + turn.input, strict=False)

    async def conversation(self, owner: str, id: str) -> Conversation:
        """Return a conversation.

        Raises:
            HttpFault: it is not there.
        """
        return (await self._conversation(owner, id))[0]

    async def items_of(self, owner: str, id: str) -> list[Item]:
        """Return the items of a conversation, the oldest first."""
        recalled = RecalledInput(owner, stores=False)
        _, items = await self._conversation_items(recalled, id)
        return await self._resolved(recalled, items, strict=False)

    # What is written.

    async def keep(self, recalled: RecalledInput, response: dict[str, Any]) -> bool:
        """Write a finished response, and its turn of a conversation.

        Return whether it is stored: it may not be, if the policy is to let answers pass.

        Raises:
            StoreAway: it could not be written, and the policy is to fail.
        """
        key = response["id"]
        kept = with_ids(recalled.kept, f"{key.removeprefix(ID_PREFIX)}-i")
        conversation = recalled.conversation
        turn = Turn(response, kept, recalled.near)
        try:
            if conversation is None:
                await self._put(recalled.owner, {key: encoded(turn)})
            else:
                turn.conversation, turn.batches = conversation.id, conversation.batches
                more = {key: encoded(turn)} if recalled.stores else {}
                await self._append(recalled.owner, conversation.id, lambda number: turn.items(), more)
        except (Unavailable, HttpFault) as error:
            if self._config.response_store_policy == "fail":
                raise
            self._failures.labels("pass").inc()
            log.warning("response %s goes out without being stored: %s", key, error)
            return False
        return True

    async def forget(self, owner: str, keys: Sequence[str]) -> None:
        """Remove records."""
        await self._ask("delete", self._store.delete(owner, keys))

    async def begin_conversation(self, owner: str, items: Sequence[Item], metadata: dict[str, Any]) -> Conversation:
        """Return a new conversation, with items."""
        name = f"{CONVERSATION_PREFIX}{secrets.token_hex(24)}"
        conversation = Conversation(name, int(time.time()), metadata, batches=1 if items else 0)
        records = {name: encoded(conversation)}
        if items:
            records[batch_key(name, 0)] = encoded(Batch(with_ids(items, _place(name, 0))))
        await self._put(owner, records)
        return conversation

    async def describe(self, owner: str, id: str, metadata: dict[str, Any]) -> Conversation:
        """Replace the notes of a conversation."""

        async def attempt() -> Conversation | None:
            conversation, data = await self._conversation(owner, id)
            conversation.metadata = metadata
            return conversation if await self._put(owner, {id: encoded(conversation)}, {id: data}) else None

        return await self._retried(owner, id, attempt)

    async def add(self, owner: str, id: str, items: Sequence[Item]) -> list[Item]:
        """Add items to a conversation; they come back with their ids."""
        return await self._append(owner, id, lambda number: with_ids(items, _place(id, number)), {})

    async def remove(self, owner: str, id: str, item: str) -> Conversation:
        """Remove an item from a conversation.

        Raises:
            HttpFault: one of the two is not there.
        """
        conversation, _ = await self._conversation(owner, id)

        async def attempt() -> Conversation | None:
            recalled = RecalledInput(owner, stores=False)
            keys = conversation.keys()
            for key, data in zip(keys, await self._load(recalled, keys), strict=True):
                items = items_of_record(key, data)
                left = [one for one in items if one.get("id") != item]
                if len(left) < len(items):
                    return conversation if await self._put(owner, {key: encoded(Batch(left))}, {key: data}) else None
            raise HttpFault(404, f"Item with id '{item[:80]}' not found in the conversation.")

        return await self._retried(owner, id, attempt)

    async def end_conversation(self, owner: str, id: str) -> None:
        """Remove a conversation with its items."""
        conversation, _ = await self._conversation(owner, id)
        await self.forget(owner, [id, *conversation.keys()])

    # Inside.

    async def _recall_chain(self, recalled: RecalledInput, previous: str) -> None:
        try:
            parent, size = await self._turn(recalled.owner, previous)
        except HttpFault as error:
            raise _no_previous(previous) from error
        recalled.size += size
        self._check_size(recalled.size)
        before = await self._before(recalled, parent)
        if before is None:
            raise _no_previous(previous, " One of those before it is not there any more.")
        recalled.before = before + parent.items()
        recalled.near = [*parent.near, previous] if len(parent.near) < NEAR else [previous]

    async def _turn(self, owner: str, id: str) -> tuple[Turn, int]:
        """Return a response that was stored, and the size of its record."""
        (data,) = await self._get(owner, [id])
        turn = decoded(Turn, id, data) if id.startswith(ID_PREFIX) else None
        if turn is None or data is None:
            raise HttpFault(404, f"Response with id '{id[:80]}' not found.")
        return turn, len(data)

    async def _before(self, recalled: RecalledInput, turn: Turn, *, strict: bool = True) -> list[Item] | None:
        """Return the items before a turn; None if some are not there any more, unless they may be left out."""
        chain = await self._ancestors(recalled, turn)
        first = chain[0] if chain else turn
        items: list[Item] = []
        if first is not None and first.conversation is not None:
            keys = [batch_key(first.conversation, number) for number in range(first.batches)]
            for key, data in zip(keys, await self._load(recalled, keys), strict=True):
                items += items_of_record(key, data)
        for each in chain:
            if each is not None:
                items += each.items()
            elif strict:
                return None
        return items

    async def _ancestors(self, recalled: RecalledInput, turn: Turn) -> list[Turn | None]:
        """Return those before a turn of a chain, the oldest first; None where one is not there any more."""
        chain: list[Turn | None] = []
        near = turn.near
        while near:
            self._check_length(len(chain) + len(near))
            found = await self._load(recalled, near)
            step = [decoded(Turn, key, data) for key, data in zip(near, found, strict=True)]
            chain[:0] = step
            oldest = step[0]
            if oldest is None:
                break
            near = oldest.near
        return chain

    async def _conversation_items(self, recalled: RecalledInput, id: str) -> tuple[Conversation, list[Item]]:
        conversation, _ = await self._conversation(recalled.owner, id)
        self._check_length(conversation.batches)
        keys = conversation.keys()
        items: list[Item] = []
        for key, data in zip(keys, await self._load(recalled, keys), strict=True):
            items += items_of_record(key, data)
        return conversation, items

    async def _conversation(self, owner: str, id: str) -> tuple[Conversation, bytes]:
        ours = id.startswith(CONVERSATION_PREFIX) and "." not in id
        data = (await self._get(owner, [id]))[0] if ours else None
        conversation = decoded(Conversation, id, data)
        if conversation is None or data is None:
            raise HttpFault(404, f"Conversation with id '{id[:80]}' not found.")
        return conversation, data

    async def _append(
        self, owner: str, id: str, make: Callable[[int], list[Item]], more: Mapping[str, bytes]
    ) -> list[Item]:
        """Add a batch that `make` makes of its number, and write `more` with it."""

        async def attempt() -> list[Item] | None:
            conversation, data = await self._conversation(owner, id)
            self._check_length(conversation.batches + 1)
            items = make(conversation.batches)
            key = batch_key(id, conversation.batches)
            conversation.batches += 1
            records = {id: encoded(conversation), key: encoded(Batch(items)), **more}
            return items if await self._put(owner, records, {id: data}) else None

        return await self._retried(owner, id, attempt)

    async def _retried(self, owner: str, id: str, attempt: Callable[[], Awaitable[T | None]]) -> T:
        """Return the result of the first attempt to write to a conversation that no other writer came before.

        The requests of this process take turns, so that they meet writers of other processes only.

        Raises:
            Unavailable: other writers came first for too long.
        """
        turn = self._writing.setdefault((owner, id), asyncio.Lock())
        wait = pauses(_FIRST_PAUSE, _LAST_PAUSE, least=0.0)
        try:
            async with asyncio.timeout(_CONTENTION), turn:
                while True:
                    result = await attempt()
                    if result is not None:
                        return result
                    await asyncio.sleep(next(wait))
        except TimeoutError as error:
            raise Unavailable(
                f"Conversation '{id[:80]}' is written to by too many requests at the same time: please retry"
            ) from error

    async def _resolved(self, recalled: RecalledInput, items: Sequence[Item], *, strict: bool = True) -> list[Item]:
        """Return items with those in the place of references that are named by them."""
        named = [item["id"] for item in items if is_reference(item)]
        if not named:
            return list(items)
        known = {item.get("id"): item for item in (*recalled.before, *items) if not is_reference(item)}
        keys = list(dict.fromkeys(record_of_item(one) for one in named if one not in known))
        self._check_length(len(keys))
        for key, data in zip(keys, await self._load(recalled, keys), strict=True):
            # The input of a later turn may itself name an item of an earlier one.
            known |= {item.get("id"): item for item in items_of_record(key, data) if not is_reference(item)}
        if strict:
            for one in named:
                if one not in known or is_reference(known[one]):
                    raise HttpFault(
                        404,
                        f"Item with id '{str(one)[:80]}' not found. Items are not persisted when `store` is set to "
                        "false. Try again with `store` set to true, or remove this item from your input.",
                    )
        found = (known.get(item["id"]) if is_reference(item) else item for item in items)
        return [item for item in found if item is not None and not is_reference(item)]

    def _check_length(self, length: int) -> None:
        most = self._config.response_store_turns
        if length > most:
            raise InvalidArgument(
                f"The conversation has more than {most} turns, which is the most that is read: begin another one, and "
                "send what matters as `input`",
                field="input",
            )

    async def _load(self, recalled: RecalledInput, keys: Sequence[str]) -> list[bytes | None]:
        """Return records in steps, as long as they are not more than may be read for one request."""
        found: list[bytes | None] = []
        for at in range(0, len(keys), NEAR):
            step = await self._get(recalled.owner, keys[at : at + NEAR])
            recalled.size += sum(len(data) for data in step if data is not None)
            self._check_size(recalled.size)
            found += step
        return found

    def _check_size(self, size: int) -> None:
        most = self._config.response_store_context_mb
        if size > most * _MB:
            raise InvalidArgument(
                f"The conversation takes more than {most} MB, which is the most that is stored: begin another one, "
                "send what matters as `input`, or send all of it with `store: false`",
                field="input",
            )

    async def _get(self, owner: str, keys: Sequence[str]) -> list[bytes | None]:
        if not _fits(keys):
            return [None] * len(keys)
        return await self._ask("get", self._store.get(owner, keys, self._config.response_store_life))

    async def _put(
        self, owner: str, records: Mapping[str, bytes], expected: Mapping[str, bytes | None] | None = None
    ) -> bool:
        return await self._ask("put", self._store.put(owner, records, self._config.response_store_life, expected))

    async def _ask(self, operation: str, call: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._config.response_store_timeout):
                return await call
        except Exception as error:
            self._failures.labels(operation).inc()
            told = str(error) or f"no answer within {self._config.response_store_timeout:g} s"
            log.warning("the response store fails to %s: %s", operation, told)
            raise StoreAway(
                "Responses cannot be stored or read now: please retry, or send the whole conversation with "
                "`store: false`",
                cause=error,
            ) from error


def _place(conversation: str, number: int) -> str:
    return f"{conversation.removeprefix(CONVERSATION_PREFIX)}.{number}-"


def _fits(keys: Iterable[str]) -> bool:
    """Return whether they can be keys of a store; ids of clients may be anything."""
    return all(0 < len(key) <= 256 for key in keys)


def _no_previous(id: str, why: str = "") -> PreviousResponseNotFound:
    return PreviousResponseNotFound(
        f"Previous response with id '{id[:80]}' not found.{why}", field="previous_response_id"
    )


def response_memory(services: FrontendServices, config: ResponsesConfig) -> ResponseMemory | None:
    """Return the memory, if the settings name a store."""
    store = services.response_store
    return None if store is None else ResponseMemory(store, config, services)
