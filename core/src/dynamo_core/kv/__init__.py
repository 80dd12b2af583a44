"""Hashes of token blocks, shared by engines, routers and the slot tracker."""

from dynamo_core.kv.hashes import block_hashes, sequence_hashes, to_signed, to_unsigned

__all__ = ["block_hashes", "sequence_hashes", "to_signed", "to_unsigned"]
