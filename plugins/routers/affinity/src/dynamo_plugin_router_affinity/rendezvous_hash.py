"""Weighted rendezvous hashing, and the bound on the load of one worker. Pure: values in, values out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import blake2b

from dynamo_core.protocol import ModelCard

#: The requests that a rank runs at once if its worker does not say, as vLLM does by default.
MAX_NUM_SEQS = 256
#: A worker has at most 5/4 of its share of all requests.
_BOUND = (5, 4)


def capacity_of(card: ModelCard) -> int:
    """Return the weight of a worker: the requests that all its ranks run at once."""
    facts = card.runtime_config
    return (facts.max_num_seqs or MAX_NUM_SEQS) * facts.data_parallel_size


class SessionHash:
    """The place of a session. It depends on the texts alone, and is the same everywhere."""

    __slots__ = ("_key",)

    def __init__(self, session: str) -> None:
        self._key = blake2b(session.encode(), digest_size=16).digest()

    def distance(self, name: str, weight: int = 1) -> float:
        """Return how far a session is from something; the nearest has it.

        It depends on no other name, so that one that comes or goes moves no session between others. Of all sessions
        each name is nearest to a share in proportion to its weight.
        """
        drawn = int.from_bytes(blake2b(name.encode(), digest_size=8, key=self._key).digest())
        return -math.log((drawn + 0.5) / 2**64) / weight


def within_bound(requests: Mapping[int, int], capacities: Mapping[int, int]) -> set[int]:
    """Return the workers that can have one more of the requests and stay within their bound; at least one.

    The bound is ``ceil(1.25 × (requests + 1) × share)``, where the share of a worker is its part of all capacity.
    """
    factor, divisor = _BOUND
    most, whole = factor * (sum(requests.values()) + 1), divisor * sum(capacities.values())
    return {worker for worker, active in requests.items() if active < -(-most * capacities[worker] // whole)}
