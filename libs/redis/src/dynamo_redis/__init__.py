"""The base of plugins over Redis or Valkey: settings, connections and errors."""

from dynamo_core.lazy import exports as _exports

__getattr__, __dir__, __all__ = _exports(__name__, __file__)
