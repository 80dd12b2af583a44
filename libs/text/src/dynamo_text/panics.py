"""Panics of the tokenizer library, which is written in Rust.

A panic is no `Exception` in Python, so that nothing that handles a failed request would handle it. Here it becomes one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from dynamo_core.protocol import truncated

P = ParamSpec("P")
T = TypeVar("T")


class TokenizerPanic(RuntimeError):
    """The library has panicked: the model's tokenizer is broken, or the library is."""


def raise_panics(call: Callable[P, T]) -> Callable[P, T]:
    """Return the call with panics of the library raised as `TokenizerPanic`."""

    @wraps(call)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            # Each module that is written in Rust has a type of its own, of this name.
            if type(error).__name__ != "PanicException":
                raise
            raise TokenizerPanic(f"the library tokenizers panicked: {truncated(str(error))}") from error

    return guarded
