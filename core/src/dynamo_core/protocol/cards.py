"""Checks of discovery records. Frontends apply them when they read, workers before they register."""

from __future__ import annotations

from typing import Final

import msgspec

from dynamo_core.protocol.decoding import Unreadable, check_depth, read, truncated
from dynamo_core.protocol.records import ACCEPTED_PROTOS, PROTO, WORKER_STATES, FrontendRecord, Instance, ModelCard

#: Characters of a model's name. Clients send it; lists, logs and metrics show it.
MAX_NAME: Final = 256
#: Data-parallel ranks of one worker; frontends keep the load of each.
MAX_RANKS: Final = 4096
#: The largest accepted number of tokens, blocks or requests.
MAX_COUNT: Final = 2**53
#: Ids of leases are less.
MAX_ID: Final = 2**63

_cards = msgspec.json.Decoder(ModelCard)
_instances = msgspec.json.Decoder(Instance)
_frontends = msgspec.json.Decoder(FrontendRecord)


def read_card(data: bytes) -> ModelCard:
    """Return the card in a record.

    Raises:
        Unreadable: it is no card, one of another protocol, or one with a value that no worker may publish.
    """
    card = read(_cards, data)
    _check_proto(card.proto)
    check_card(card)
    return card


def read_instance(data: bytes) -> Instance:
    """Return the instance in a record.

    Raises:
        Unreadable: it is no instance, or one of another protocol or in a state that is not known.
    """
    instance = read(_instances, data)
    _check_proto(instance.proto)
    check_state(instance.state)
    return instance


def read_frontend(data: bytes) -> FrontendRecord:
    """Return the frontend in a record.

    Raises:
        Unreadable: it is no frontend, one of another protocol, or its id is none.
    """
    frontend = read(_frontends, data)
    _check_proto(frontend.proto)
    if not 0 <= frontend.frontend_id < MAX_ID:
        raise Unreadable(f"its frontend_id is {frontend.frontend_id}; 0 to {MAX_ID - 1} can be")
    return frontend


def check_card(card: ModelCard) -> None:
    """Reject a card that frontends could not use.

    Raises:
        Unreadable: the name, a number, or how deeply `runtime_data` is nested.
    """
    try:
        check_model_name(card.name)
    except ValueError as error:
        raise Unreadable(f"its model's name {error}") from None
    _check_numbers(card)
    check_depth(card.runtime_config.runtime_data)


def check_state(state: str) -> None:
    """Reject a state that no worker can be in.

    Raises:
        Unreadable: it is not one of `WORKER_STATES`.
    """
    if state not in WORKER_STATES:
        known = ", ".join(map(repr, WORKER_STATES))
        raise Unreadable(f"its state is {truncated(repr(state), 40)}; {known} can be")


def check_model_name(name: str) -> None:
    """Reject a name that lists, logs and metrics could not show as it is.

    Raises:
        ValueError: it is blank, longer than `MAX_NAME` characters, or has control or format characters, such as those
            that turn the direction of writing. The text goes on after the name of what holds it.
    """
    if not name.strip():
        raise ValueError("is blank")
    if len(name) > MAX_NAME:
        raise ValueError(f"has {len(name)} characters, more than {MAX_NAME}: {truncated(name, 20)}")
    if not name.isprintable():
        raise ValueError(f"has characters that do not show: {truncated(name)}")


def _check_proto(proto: int) -> None:
    """Refuse a record of a version that this one does not read, by name."""
    if proto not in ACCEPTED_PROTOS:
        raise Unreadable(f"it speaks protocol {proto}, this process speaks {PROTO}")


def _check_numbers(card: ModelCard) -> None:
    facts = card.runtime_config
    if not 1 <= facts.data_parallel_size <= MAX_RANKS:
        raise Unreadable(f"its data_parallel_size is {facts.data_parallel_size}; 1 to {MAX_RANKS} can be")
    if card.kv_cache_block_size is not None and not 1 <= card.kv_cache_block_size <= MAX_COUNT:
        raise Unreadable(f"its kv_cache_block_size is {card.kv_cache_block_size}; 1 to {MAX_COUNT} can be")
    counts = {
        "context_length": card.context_length,
        "migration_limit": card.migration_limit,
        "total_kv_blocks": facts.total_kv_blocks,
        "max_num_seqs": facts.max_num_seqs,
        "max_num_batched_tokens": facts.max_num_batched_tokens,
        "data_parallel_start_rank": facts.data_parallel_start_rank,
    }
    for name, count in counts.items():
        if count is not None and not 0 <= count <= MAX_COUNT:
            raise Unreadable(f"its {name} is {count}; 0 to {MAX_COUNT} can be")
