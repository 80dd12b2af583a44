"""Between text and token ids: tokenizers, detokenizing, stop strings, and readers of tool calls in pieces."""

from dynamo_core.lazy import exports as _exports

__getattr__, __dir__, __all__ = _exports(__name__, __file__)
