"""Text and token ids: tokenizers, detokenizing, stop strings, and incremental readers of tool calls."""

from dynamo_core.lazy import exports as _exports

__getattr__, __dir__, __all__ = _exports(__name__, __file__)
