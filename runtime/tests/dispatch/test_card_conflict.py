"""Workers of one model that do not go together: what the log says of the one that is left out."""

from __future__ import annotations

from typing import Any

from dynamo_core.kv.hashes import SCHEME
from dynamo_core.protocol.records import ModelCard
from dynamo_runtime.dispatch.models.model import card_conflict


def card(**facts: Any) -> ModelCard:
    known: dict[str, Any] = {"name": "m", "instance_id": 1, "checksum": "a", "kv_cache_block_size": 16}
    return ModelCard(**(known | facts))


def test_workers_that_are_alike_go_together() -> None:
    assert card_conflict(card(), card(instance_id=2)) is None


def test_another_block_size_is_named() -> None:
    conflict = card_conflict(card(), card(kv_cache_block_size=32, checksum="b"))

    assert conflict is not None
    assert "of 32 tokens" in str(conflict)
    assert "of 16" in str(conflict)


def test_a_different_kv_hashing_conflicts_and_an_absent_one_does_not() -> None:
    conflict = card_conflict(card(kv_hashing=SCHEME), card(kv_hashing="sha256"))

    assert conflict is not None
    assert "sha256" in str(conflict)
    assert card_conflict(card(kv_hashing=SCHEME), card()) is None
    assert card_conflict(card(), card(kv_hashing=SCHEME)) is None


def test_other_card_differences_are_named() -> None:
    assert "checksum" in str(card_conflict(card(), card(checksum="b")))
