"""Values that travel between processes, and decoding of foreign bytes. Structs only grow at the end."""

from dynamo_core.lazy import exports as _exports

__getattr__, __dir__, __all__ = _exports(__name__, __file__)
