"""The active sequences of one data-parallel rank: unique KV blocks, tokens still to prefill, requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile
from typing import NamedTuple


class ActiveSequence(NamedTuple):
    """One active request: its different hashes in order, its tokens still to prefill, and when it was added."""

    request_id: str
    hashes: tuple[int, ...]
    prefill_tokens: int
    added: float


class ActiveSequences:
    """Accounting of one rank. Blocks shared by several requests count once; every figure is kept incrementally."""

    __slots__ = ("_blocks", "_requests", "prefill_tokens")

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}
        #: In the order in which they were added.
        self._requests: dict[str, tuple[tuple[int, ...], int, float]] = {}
        #: Tokens of requests whose prefill has not been completed.
        self.prefill_tokens = 0

    @property
    def blocks(self) -> int:
        """The number of different blocks the active requests hold."""
        return len(self._blocks)

    @property
    def requests(self) -> int:
        """The number of active requests."""
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[ActiveSequence]:
        """Yield the active requests, the one added first being the first."""
        for request_id, entry in self._requests.items():
            yield ActiveSequence(request_id, *entry)

    def get(self, request_id: str) -> ActiveSequence | None:
        """Return an active request."""
        entry = self._requests.get(request_id)
        return None if entry is None else ActiveSequence(request_id, *entry)

    def add(self, request_id: str, hashes: Sequence[int], new_tokens: int, now: float = 0.0) -> None:
        """Count a request in. A hash repeated within one request counts once.

        `now` matters for `expire` only: seconds of any clock that does not go back from one call to the next.

        Raises:
            KeyError: the request is already active.
        """
        if request_id in self._requests:
            raise KeyError(request_id)
        unique = tuple(dict.fromkeys(hashes))
        self._requests[request_id] = (unique, new_tokens, now)
        blocks = self._blocks
        for block in unique:
            blocks[block] = blocks.get(block, 0) + 1
        self.prefill_tokens += new_tokens

    def complete_prefill(self, request_id: str) -> bool:
        """Take the request's tokens off the prefill count; False if it is not active. Repeating it changes nothing."""
        entry = self._requests.get(request_id)
        if entry is None:
            return False
        hashes, tokens, added = entry
        if tokens:
            self.prefill_tokens -= tokens
            self._requests[request_id] = (hashes, 0, added)
        return True

    def free(self, request_id: str) -> bool:
        """Count the request out; False if it was not active."""
        entry = self._requests.pop(request_id, None)
        if entry is None:
            return False
        hashes, tokens, _ = entry
        self.prefill_tokens -= tokens
        blocks = self._blocks
        for block in hashes:
            count = blocks[block] - 1
            if count:
                blocks[block] = count
            else:
                del blocks[block]
        return True

    def expire(self, before: float) -> list[str]:
        """Count out the requests added before a time of the clock given to `add`; return their ids."""
        expired = []
        # The oldest come first, so that only those that go are looked at, and one more.
        for request_id, (_, _, added) in self._requests.items():
            if added >= before:
                break
            expired.append(request_id)
        for request_id in expired:
            self.free(request_id)
        return expired

    def potential_blocks(self, hashes: Sequence[int]) -> int:
        """Return how many blocks would be active if a request with this chain were added."""
        blocks = self._blocks
        if not hashes or hashes[0] not in blocks:
            return len(blocks) + len(hashes)
        shared = len(list(takewhile(blocks.__contains__, hashes)))
        return len(blocks) + len(hashes) - shared


_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
#: Not 0, or a first hash of 0 would leave no trace.
_START = 0xD1B54A32D192ED03


def prefix_keys(hashes: Sequence[int]) -> list[int]:
    """Return a number for each prefix of `hashes`, the same for the same prefix; 64 bits, as the hashes themselves."""
    keys = accumulate(hashes, lambda key, value: (key * _MULTIPLIER + value) & _MASK, initial=_START)
    # The first is that of no hash at all.
    next(keys)
    return list(keys)


class ActivePrefixes(ActiveSequences):
    """The same for hashes that need not be chained: a block is shared only together with all that stand before it.

    Twice the work of `ActiveSequences`, which gives the same figures where hashes are chained.
    """

    __slots__ = ("_keys", "_prefixes")

    def __init__(self) -> None:
        super().__init__()
        #: How many requests begin with each prefix, and the prefixes of each request.
        self._prefixes: dict[int, int] = {}
        self._keys: dict[str, list[int]] = {}

    def add(self, request_id: str, hashes: Sequence[int], new_tokens: int, now: float = 0.0) -> None:
        """Do the same as in `ActiveSequences`."""
        super().add(request_id, hashes, new_tokens, now)
        keys = self._keys[request_id] = prefix_keys(self._requests[request_id][0])
        prefixes = self._prefixes
        for key in keys:
            prefixes[key] = prefixes.get(key, 0) + 1

    def free(self, request_id: str) -> bool:
        """Do the same as in `ActiveSequences`."""
        if not super().free(request_id):
            return False
        prefixes = self._prefixes
        for key in self._keys.pop(request_id):
            count = prefixes[key] - 1
            if count:
                prefixes[key] = count
            else:
                del prefixes[key]
        return True

    def potential_blocks(self, hashes: Sequence[int]) -> int:
        """Return how many blocks would be active if a request with these hashes were added.

        Repeated ones count once.
        """
        unique = list(dict.fromkeys(hashes))
        return self.blocks + len(unique) - self.shared_prefix(prefix_keys(unique))

    def shared_prefix(self, keys: Sequence[int]) -> int:
        """Return how many blocks active requests begin with, of a request that has these `prefix_keys`."""
        prefixes = self._prefixes
        if not keys or keys[0] not in prefixes:
            return 0
        if keys[-1] in prefixes:
            return len(keys)
        return len(list(takewhile(prefixes.__contains__, keys)))
