"""The configuration: one file, a few layers over it, and the origin of every value."""

from dynamo_core.lazy import exports as _exports

__getattr__, __dir__, __all__ = _exports(__name__, __file__)
