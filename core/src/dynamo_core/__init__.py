"""Contracts, hooks and plugin manager of an LLM serving framework in which every stage is a plugin.

These names are the public API for authors of plugins, with those of `dynamo_core.errors`, `dynamo_core.protocol` and
`dynamo_core.kv`. ``__init__.pyi`` lists them; each is loaded when first used.
"""

from dynamo_core.lazy import exports as _exports

__getattr__, __dir__, __all__ = _exports(__name__, __file__)
