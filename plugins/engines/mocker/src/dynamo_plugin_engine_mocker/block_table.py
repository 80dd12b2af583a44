"""The block table of one sequence: held KV blocks, and the hashes by which they are shared."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_core import KvBlock
from dynamo_core.kv import block_hashes, sequence_hashes

from dynamo_plugin_engine_mocker.blocks import BlockPool


class PrefixHashes:
    """The hashes of the full blocks of a prompt and, as far as requested, of its answer."""

    __slots__ = ("_answer", "_block_size", "_cache_salt", "_lora_name", "_prompt_tokens", "_tail", "blocks", "chain")

    def __init__(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        block_size: int,
        lora_name: str | None,
        cache_salt: str | None = None,
    ) -> None:
        """`answer` grows while it is being produced.

        Raises:
            OverflowError: a token id does not fit 32 bits.
        """
        self._answer = answer
        self._block_size = block_size
        self._lora_name = lora_name
        self._cache_salt = cache_salt
        self._prompt_tokens = len(prompt)
        #: One hash per block.
        self.blocks = block_hashes(prompt, block_size, lora_name=lora_name, cache_salt=cache_salt)
        #: One hash per block that stands for everything up to its end.
        self.chain = sequence_hashes(self.blocks)
        #: The tokens of the prompt that share a block with the answer.
        self._tail = list(prompt[len(self.blocks) * block_size :])

    def extend(self, count: int) -> None:
        """Make sure of the hashes of the first `count` blocks, whose tokens must be there."""
        while len(self.blocks) < count:
            begin = len(self.blocks) * self._block_size - self._prompt_tokens
            end = begin + self._block_size
            tokens = self._answer[begin:end] if begin >= 0 else [*self._tail, *self._answer[:end]]
            (block,) = block_hashes(tokens, self._block_size, lora_name=self._lora_name, cache_salt=self._cache_salt)
            self.blocks.append(block)
            self.chain.append(sequence_hashes([self.chain[-1], block])[1] if self.chain else block)


class BlockTable:
    """The blocks of one sequence. Without hashes nothing is shared: every block stays private."""

    __slots__ = ("_block_size", "_hashes", "_pool", "private", "shared")

    def __init__(self, pool: BlockPool, block_size: int, hashes: PrefixHashes | None) -> None:
        self._pool = pool
        self._block_size = block_size
        self._hashes = hashes
        #: Blocks held that are full, from the start of the sequence.
        self.shared = 0
        #: Blocks held behind those.
        self.private = 0

    @property
    def hashes(self) -> Sequence[int]:
        """The sequence hashes of the full blocks held."""
        return self._hashes.chain[: self.shared] if self._hashes is not None else ()

    def match(self, tokens: int) -> int:
        """Return how many blocks of the first `tokens` tokens are there already.

        At least one token is left to compute.
        """
        if self._hashes is None:
            return 0
        return self._pool.match(self._hashes.chain[: (tokens - 1) // self._block_size])

    def reserve(self, tokens: int, matched: int) -> bool:
        """Take all blocks for so many tokens, of which `matched` are there; False if there are too few."""
        private = -(-tokens // self._block_size) - matched
        chain = self._hashes.chain[:matched] if self._hashes is not None else ()
        if not self._pool.acquire(chain, private):
            return False
        self.shared, self.private = matched, private
        return True

    def grow(self) -> bool:
        """Take one block more; False if there is none."""
        if not self._pool.acquire((), 1):
            return False
        self.private += 1
        return True

    def complete(self, computed: int) -> int:
        """Let others share every block whose tokens are all among the first `computed`; how many are new."""
        hashes = self._hashes
        full = computed // self._block_size
        new = full - self.shared
        if hashes is None or new <= 0:
            return 0
        hashes.extend(full)
        blocks = [KvBlock(hashes.chain[place], hashes.blocks[place]) for place in range(self.shared, full)]
        self._pool.fill(blocks, hashes.chain[self.shared - 1] if self.shared else None)
        self.shared = full
        self.private -= new
        return new

    def release(self) -> None:
        """Give everything back; repeating it does nothing."""
        self._pool.release(self.hashes, self.private)
        self.shared = self.private = 0
