"""Blocks under a salt are shared only with requests that give it."""

from __future__ import annotations

from dynamo_core.kv.hashes import block_hashes, block_seed, lora_seed


def test_every_salt_and_adapter_has_hashes_of_its_own() -> None:
    tokens = list(range(32))
    names = [(None, None), ("a", None), (None, "a"), ("a", "a"), ("a", "b"), (None, "b")]

    found = [tuple(block_hashes(tokens, 16, lora_name=lora, cache_salt=salt)) for lora, salt in names]

    assert len(set(found)) == len(names)


def test_without_a_salt_the_seed_is_that_of_the_adapter() -> None:
    assert block_seed("a", None) == block_seed("a", "") == lora_seed("a")
