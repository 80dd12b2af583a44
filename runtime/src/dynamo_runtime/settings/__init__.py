"""The configuration: one file, a few layers over it, and for every value a note of where it came from."""

from dynamo_core.lazy import exports as _exports

__getattr__, __dir__, __all__ = _exports(__name__, __file__)
