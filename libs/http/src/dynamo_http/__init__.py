"""HTTP listeners of this process and what every one of them serves: limits, error bodies, health, metrics."""

from dynamo_core.lazy import exports as _exports

__getattr__, __dir__, __all__ = _exports(__name__, __file__)
