"""The base of discovery plugins: keep leases alive, follow stores, notify watches."""

from dynamo_core.lazy import exports as _exports

__getattr__, __dir__, __all__ = _exports(__name__, __file__)
