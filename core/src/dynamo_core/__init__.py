"""Contracts, hooks and runtime of an LLM serving framework in which every stage is a plugin.

These names are the public API for authors of plugins, with those of `dynamo_core.errors`, `dynamo_core.protocol`,
`dynamo_http`, `dynamo_core.kv` and `dynamo_telemetry`. ``__init__.pyi`` lists them; each is loaded when first
used.
"""

from dynamo_core.lazy import exports as _exports

__getattr__, __dir__, __all__ = _exports(__name__, __file__)
