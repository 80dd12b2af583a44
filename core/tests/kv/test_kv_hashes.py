from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dynamo_core.kv import block_hashes, sequence_hashes, to_signed, to_unsigned
from hypothesis import given
from hypothesis import strategies as st

CASES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("kv_hashes.json").read_text())["cases"]

#: Known answers that our functions do not claim to give, and why.
NOT_SUPPORTED = {
    "cache_namespace": "the formula is not known",
    "lora_name and cache_namespace": "the formula is not known",
    "is_eagle": "blocks with one token of look-ahead belong to a speculative decoder that no engine here has",
    "multimodal hash on block 0": "requests hold token ids only",
    "two multimodal hashes on block 0, given unsorted": "requests hold token ids only",
}

SUPPORTED = [case for case in CASES if case["name"] not in NOT_SUPPORTED]

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def test_every_known_answer_is_checked_or_listed_with_a_reason() -> None:
    names = {case["name"] for case in CASES}

    assert names >= set(NOT_SUPPORTED)
    assert all(case["formula_confirmed"] for case in SUPPORTED)
    assert {option for case in SUPPORTED for option in case["options"]} == {"lora_name"}


@pytest.mark.parametrize("case", SUPPORTED, ids=lambda case: case["name"])
def test_hashes_equal_the_known_answers(case: dict[str, Any]) -> None:
    blocks = block_hashes(case["tokens"], case["block_size"], **case["options"])

    assert blocks == [int(text) for text in case["block_hashes"]]
    if "sequence_hashes" in case:
        assert sequence_hashes(blocks) == [int(text) for text in case["sequence_hashes"]]


@given(token_lists, token_lists, st.integers(1, 8))
def test_a_common_prefix_has_common_hashes_and_nothing_else_has(
    tokens: list[int], others: list[int], block_size: int
) -> None:
    first = sequence_hashes(block_hashes(tokens, block_size))
    second = sequence_hashes(block_hashes(others, block_size))

    for at, (left, right) in enumerate(zip(first, second, strict=False), start=1):
        same = tokens[: at * block_size] == others[: at * block_size]
        assert (left == right) == same


@given(token_lists, st.integers(1, 8))
def test_only_full_blocks_are_hashed(tokens: list[int], block_size: int) -> None:
    whole = len(tokens) // block_size

    assert len(block_hashes(tokens, block_size)) == whole
    assert block_hashes(tokens, block_size) == block_hashes(tokens[: whole * block_size], block_size)


def test_an_empty_adapter_name_is_no_adapter() -> None:
    assert block_hashes([1, 2], 2, lora_name="") == block_hashes([1, 2], 2)


@given(st.integers(0, 2**64 - 1))
def test_signed_and_unsigned_are_the_same_bits(value: int) -> None:
    signed = to_signed(value)

    assert -(2**63) <= signed < 2**63
    assert signed.to_bytes(8, "big", signed=True) == value.to_bytes(8, "big")
    assert to_unsigned(signed) == value


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_size_that_is_not_positive_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match="block_size must be greater than 0"):
        block_hashes([1], block_size)


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_block_hashes_refuse_a_token_id_beyond_32_bits(token_id: int) -> None:
    with pytest.raises(OverflowError):
        block_hashes([token_id], 1)
