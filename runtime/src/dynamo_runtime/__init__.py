"""The serving runtime: settings, assembly, dispatch, workers, processes, and the command ``dynamo``.

``__init__.pyi`` lists the public names; each is loaded when first used.
"""

from dynamo_core.lazy import exports as _exports

__getattr__, __dir__, __all__ = _exports(__name__, __file__)
