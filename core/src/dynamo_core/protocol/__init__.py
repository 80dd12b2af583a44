"""Values that travel between processes, and how foreign bytes are read. Structs only grow at the end."""

from dynamo_core.lazy import exports as _exports

__getattr__, __dir__, __all__ = _exports(__name__, __file__)
