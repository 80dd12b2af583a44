"""Hashes of token blocks, shared by engines, routers and the slot tracker."""

from dynamo_core.kv.hashes import block_hashes, sequence_hashes, to_signed, to_unsigned
from dynamo_core.kv.sequences import ActivePrefixes, ActiveSequence, ActiveSequences, prefix_keys

__all__ = [
    "ActivePrefixes",
    "ActiveSequence",
    "ActiveSequences",
    "block_hashes",
    "prefix_keys",
    "sequence_hashes",
    "to_signed",
    "to_unsigned",
]
