"""vLLM's KV cache events as ours: its hashes stay the names of blocks, the token ids give the local hashes.

Nothing here needs vLLM: events come decoded, as maps (``{"type": "BlockStored", …}``) or, from older versions, as
arrays (``["BlockStored", …]``). Fields that are not known are passed over.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from dynamo_core import KvBlock, KvCleared, KvRemoved, KvStored
from dynamo_core.kv import block_hashes, to_unsigned

Change: TypeAlias = KvStored | KvRemoved | KvCleared

#: The order of fields where events are arrays.
_FIELDS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
#: Where blocks lie that a request can use at once.
_DEVICE = (None, "GPU")
#: Kinds of layers for which a cached prefix saves the work of all its tokens.
_WHOLE = (None, "full_attention", "mla_attention", "sink_full_attention")

log = logging.getLogger(__name__)


class EventTranslator:
    """Follows the cache of one rank.

    A block is told once its whole prefix is: so blocks whose beginning was lost, or that cannot be hashed here, are
    left out, and so is whatever follows them. Several copies of a block are one: it is removed with the last of them.
    """

    __slots__ = ("_block_size", "_copies", "_salts", "_warned")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._copies: dict[int, int] = {}
        #: The salt of blocks that were made under one.
        self._salts: dict[int, str] = {}
        self._warned = False

    def __len__(self) -> int:
        """Return how many different blocks are known to be there."""
        return len(self._copies)

    def changes(self, events: Sequence[Any]) -> list[Change]:
        """Return what a batch of events means, in order."""
        found: list[Change] = []
        for event in events:
            kind, fields = _read(event)
            change: Change | None = None
            if kind == "BlockStored":
                change = self._stored(fields)
            elif kind == "BlockRemoved":
                change = self._removed(fields)
            elif kind == "AllBlocksCleared":
                change = self.clear()
            if change is not None:
                found.append(change)
        return found

    def clear(self) -> KvCleared:
        """Forget everything."""
        self._copies.clear()
        self._salts.clear()
        return KvCleared()

    def _stored(self, fields: Mapping[str, Any]) -> KvStored | None:
        if fields.get("medium") not in _DEVICE or fields.get("kv_cache_spec_kind") not in _WHOLE:
            return None
        hashes = [_number(value) for value in fields["block_hashes"]]
        tokens = fields["token_ids"]
        if fields["block_size"] != self._block_size or len(tokens) != len(hashes) * self._block_size:
            self._warn(f"blocks of {fields['block_size']} tokens, not {self._block_size}")
            return None
        parent = fields.get("parent_block_hash")
        parent = None if parent is None else _number(parent)
        if parent is not None and parent not in self._copies:
            return None
        salt = None if parent is None else self._salts.get(parent)
        for extra in fields.get("extra_keys") or ():
            if not extra:
                continue
            if fields.get("lora_name") or len(extra) != 1 or not isinstance(extra[0], str) or parent is not None:
                # Adapters, or pictures in between: such prefixes are not what the token ids say.
                return None
            salt = extra[0]
        own = block_hashes(tokens, self._block_size, cache_salt=salt)
        for block in hashes:
            self._copies[block] = self._copies.get(block, 0) + 1
            if salt is not None:
                self._salts[block] = salt
        return KvStored([KvBlock(*pair) for pair in zip(hashes, own, strict=True)], parent_hash=parent)

    def _removed(self, fields: Mapping[str, Any]) -> KvRemoved | None:
        if fields.get("medium") not in _DEVICE:
            return None
        gone = []
        for value in fields["block_hashes"]:
            block = _number(value)
            copies = self._copies.get(block)
            if copies is None:
                continue
            if copies > 1:
                self._copies[block] = copies - 1
                continue
            del self._copies[block]
            self._salts.pop(block, None)
            gone.append(block)
        return KvRemoved(gone) if gone else None

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("vLLM reports %s: routers do not get them", what)


def _read(event: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(event, Mapping):
        return str(event.get("type")), event
    kind, *values = event
    return str(kind), dict(zip(_FIELDS.get(kind, ()), values, strict=False))


def _number(block_hash: int | bytes) -> int:
    """Return an engine's block hash as 64 bits without a sign."""
    if isinstance(block_hash, bytes):
        return int.from_bytes(block_hash[-8:], "big")
    return to_unsigned(block_hash)
