"""HTTP listeners of a process, with limits, error bodies, health and metrics."""

from dynamo_core.lazy import exports as _exports

__getattr__, __dir__, __all__ = _exports(__name__, __file__)
