"""Hashes of token blocks, shared by engines, routers and the slot tracker."""

from dynamo_core.lazy import exports as _exports

__getattr__, __dir__, __all__ = _exports(__name__, __file__)
