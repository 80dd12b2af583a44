"""What runs on one data-parallel rank right now: unique KV blocks, tokens still to prefill, requests."""

from __future__ import annotations

from collections.abc import Sequence


class ActiveSequences:
    """Accounting of one rank. Blocks shared by several requests count once; every figure is kept incrementally."""

    __slots__ = ("_blocks", "_requests", "prefill_tokens")

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}
        self._requests: dict[str, tuple[tuple[int, ...], int]] = {}
        #: Tokens of requests whose prefill has not been completed.
        self.prefill_tokens = 0

    @property
    def blocks(self) -> int:
        """How many different blocks the active requests hold."""
        return len(self._blocks)

    @property
    def requests(self) -> int:
        """How many requests are active."""
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request_id: str, hashes: Sequence[int], new_tokens: int) -> None:
        """Counts a request in. A hash repeated within one request counts once.

        Raises:
            KeyError: the request is already active.
        """
        if request_id in self._requests:
            raise KeyError(request_id)
        unique = tuple(dict.fromkeys(hashes))
        self._requests[request_id] = (unique, new_tokens)
        for block in unique:
            self._blocks[block] = self._blocks.get(block, 0) + 1
        self.prefill_tokens += new_tokens

    def complete_prefill(self, request_id: str) -> bool:
        """Takes the request's tokens off the prefill count; False if it is not active. Repeating it changes nothing."""
        entry = self._requests.get(request_id)
        if entry is None:
            return False
        hashes, tokens = entry
        if tokens:
            self.prefill_tokens -= tokens
            self._requests[request_id] = (hashes, 0)
        return True

    def free(self, request_id: str) -> bool:
        """Counts the request out; False if it was not active."""
        entry = self._requests.pop(request_id, None)
        if entry is None:
            return False
        hashes, tokens = entry
        self.prefill_tokens -= tokens
        for block in hashes:
            count = self._blocks[block] - 1
            if count:
                self._blocks[block] = count
            else:
                del self._blocks[block]
        return True

    def potential_blocks(self, hashes: Sequence[int]) -> int:
        """How many blocks would be active if a request with this chain were added."""
        blocks = self._blocks
        shared = 0
        for block in hashes:
            if block not in blocks:
                break
            shared += 1
        return len(blocks) + len(hashes) - shared
