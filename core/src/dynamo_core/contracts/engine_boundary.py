"""Checks at the boundary between an engine and the framework, and the messages for values that break the contract.

Each message addresses the author of the engine: class and method, the value, what is expected, and the line.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path, PurePath
from types import FrameType
from typing import Any

import msgspec

from dynamo_core.contracts.config import PluginConfig
from dynamo_core.contracts.duck_typed_engine import unwrap
from dynamo_core.contracts.engine import EngineConfig, LLMEngine, WorkerConfig
from dynamo_core.errors import BackendUnknown
from dynamo_core.protocol.output import CompletionUsage, FinishReason, LLMEngineOutput

#: Modules that hold no code of an engine.
_FRAMEWORK_MODULES = ("dynamo_core", "dynamo_runtime", "builtins", "abc", "typing")
#: Functions that run an event loop. A loop that is not written in Python has no frame but that of its runner.
_LOOPS = frozenset({asyncio.Runner.run.__code__, asyncio.BaseEventLoop.run_forever.__code__})


class ContractViolation(BackendUnknown):
    """An engine broke its contract: a bug of the engine, reported to its author."""


def make_engine(cls: type[LLMEngine], config: PluginConfig, worker: WorkerConfig) -> LLMEngine:
    """Construct an engine.

    Raises:
        ContractViolation: the constructor does not take these two arguments.
        Exception: the constructor's own error.
    """
    try:
        inspect.signature(cls).bind(config, worker)
    except TypeError as error:
        code = getattr(cls.__init__, "__code__", None)
        where = "" if code is None else location(code.co_filename, code.co_firstlineno)
        raise ContractViolation(
            f"{cls.__name__} cannot be made from its settings and its WorkerConfig: {error}: "
            f"write `def __init__(self, config, worker)`, or leave it out{where}"
        ) from None
    return cls(config, worker)


async def call_async(engine: LLMEngine, method: str, *args: Any) -> Any:
    """Call a method that must be async, and return its result.

    Raises:
        ContractViolation: the method is not async.
        Exception: the method's own error.
    """
    made = getattr(engine, method)(*args)
    if not inspect.isawaitable(made):
        raise ContractViolation(
            f"{qualname(engine, method)} returned {type_name(made)}, and must be async: "
            f"write `async def {method}`{defined_at(engine, method)}"
        )
    return await made


def expect_type(engine: LLMEngine, method: str, value: Any, kind: type | tuple[type, ...], expected: str) -> None:
    """Check the type of a method's result.

    Raises:
        ContractViolation: the type is another one.
    """
    if not isinstance(value, kind):
        raise ContractViolation(
            f"{qualname(engine, method)} returned {type_name(value)}, expected {expected}{defined_at(engine, method)}"
        )


def check_engine_config(engine: LLMEngine, config: Any) -> EngineConfig:
    """Check the result of `start`: an `EngineConfig` whose fields have the right types. Empty fields are not checked.

    Raises:
        ContractViolation: a type is wrong.
    """
    expect_type(engine, "start", config, EngineConfig, "an EngineConfig")
    made: EngineConfig = config
    try:
        msgspec.convert(asdict(made), EngineConfig)
    except (TypeError, msgspec.ValidationError) as error:
        raise ContractViolation(
            f"{qualname(engine, 'start')} returned an EngineConfig with a field of a wrong type: "
            f"{str(error).replace('$.', 'EngineConfig.')}{defined_at(engine, 'start')}"
        ) from None
    return made


def check_sources(engine: LLMEngine, method: str, value: Any, kind: type) -> None:
    """Check that a method returned a list of sources of that kind.

    Raises:
        ContractViolation: it did not.
    """
    expected = f"a list of {kind.__name__}"
    expect_type(engine, method, value, Sequence, expected)
    for each in value:
        expect_type(engine, method, each, kind, expected)


def check_stream(engine: LLMEngine, items: Any) -> None:
    """Check that the result of `generate` can be iterated over.

    Raises:
        ContractViolation: it cannot.
    """
    if hasattr(items, "__aiter__"):
        return
    raise ContractViolation(stream_fault(engine, items))


def stream_fault(engine: LLMEngine, items: Any) -> str:
    """Return the message for a result of `generate` that is no stream."""
    if inspect.iscoroutine(items):
        items.close()
    return (
        f"{qualname(engine, 'generate')} returned {type_name(items)}, expected an async generator: "
        f"write `async def generate` with `yield` in it{defined_at(engine, 'generate')}"
    )


def item_fault(engine: LLMEngine, items: Any, item: Any) -> str:
    """Return the message for a yielded item that is no engine output."""
    return (
        f"{qualname(engine, 'generate')} yielded {type_name(item)}, expected an LLMEngineOutput"
        f"{suspended_at(items) or defined_at(engine, 'generate')}"
    )


def content_fault(item: LLMEngineOutput, vocabulary: int | None) -> str:
    """Return the message for an item with wrong fields; empty if all are right.

    `vocabulary` is the number of token ids.
    """
    # The types have not been checked before.
    fields: Any = item
    tokens = fields.token_ids
    if not isinstance(tokens, list):
        return f"token_ids is {type_name(tokens)}, not a list of integers"
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool):
            return f"token id {token!r} is {type_name(token)}, not an integer"
        if token < 0:
            return f"token id {token} is negative"
        if vocabulary is not None and token >= vocabulary:
            return f"token id {token} is beyond the vocabulary, whose ids end at {vocabulary - 1}"
    reason = fields.finish_reason
    if reason is not None and not isinstance(reason, FinishReason):
        return f"finish_reason is {type_name(reason)}, not a FinishReason: end with LLMEngineOutput.stop() or .length()"
    if fields.completion_usage is not None and not isinstance(fields.completion_usage, CompletionUsage):
        return f"completion_usage is {type_name(fields.completion_usage)}: make it with usage(prompt, completion)"
    if fields.text is not None and not isinstance(fields.text, str):
        return f"text is {type_name(fields.text)}, not a str"
    for name in ("log_probs", "top_logprobs"):
        given = getattr(fields, name)
        if given is not None and (not isinstance(given, list) or len(given) != len(tokens)):
            many = len(given) if isinstance(given, list) else type_name(given)
            return f"{name} is {many} for {len(tokens)} tokens: one entry per new token"
    return ""


def usage_fault(usage: CompletionUsage, *, prompt: int | None, tokens: int | None, stopped: bool = False) -> str:
    """Return the message for a usage that cannot be right; empty if it can. None means that the number is not known.

    An answer that a stop condition ended (`stopped`) may count the token that ended it, although that token is hidden.
    """
    details = (usage.cached_tokens or 0, usage.reasoning_tokens or 0)
    if min(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, *details) < 0:
        return "usage has a negative number"
    if prompt is not None and usage.prompt_tokens != prompt:
        return f"usage says {usage.prompt_tokens} prompt tokens, the prompt had {prompt}"
    if tokens is not None and usage.completion_tokens not in ((tokens, tokens + 1) if stopped else (tokens,)):
        return f"usage says {usage.completion_tokens} completion tokens, {tokens} came"
    total = usage.prompt_tokens + usage.completion_tokens
    if usage.total_tokens != total:
        return f"usage says {usage.total_tokens} tokens in all, prompt and completion are {total}"
    if (usage.cached_tokens or 0) > usage.prompt_tokens:
        return f"usage says {usage.cached_tokens} cached tokens of {usage.prompt_tokens} in the prompt"
    if (usage.reasoning_tokens or 0) > usage.completion_tokens:
        return f"usage says {usage.reasoning_tokens} reasoning tokens of {usage.completion_tokens} in the completion"
    return ""


# Names and places.


def author_class(engine: LLMEngine) -> type:
    """Return the class that the engine's author wrote."""
    return type(unwrap(engine))


def engine_name(engine: LLMEngine) -> str:
    """Return the name of an engine in logs: its `NAME`, or else the name of its class."""
    name = getattr(unwrap(engine), "NAME", "")
    return name if isinstance(name, str) and name else author_class(engine).__qualname__.rpartition("<locals>.")[2]


def qualname(engine: LLMEngine, method: str) -> str:
    """Return the method's full name."""
    return f"{author_class(engine).__qualname__.rpartition('<locals>.')[2]}.{method}"


def type_name(value: Any) -> str:
    """Return the type of a value, in words."""
    if value is None:
        return "None"
    word = type(value).__name__
    return f"{'an' if word[0].lower() in 'aeiou' else 'a'} {word}"


def defined_at(engine: LLMEngine, method: str) -> str:
    """Return the place of a method's definition, in brackets; empty if it is not known."""
    function: Any = getattr(author_class(engine), method, None) or getattr(unwrap(engine), method, None)
    code = getattr(function, "__code__", None)
    return "" if code is None else location(code.co_filename, code.co_firstlineno)


def suspended_at(items: Any) -> str:
    """Return the line at which a generator is suspended: the `yield` of its last item, or its `await`. In brackets."""
    frame = getattr(items, "ag_frame", None)
    return "" if frame is None else location(frame.f_code.co_filename, frame.f_lineno)


def location(filename: str, line: int | None) -> str:
    """Return a line of a file, in brackets, as it follows a message."""
    return f" ({PurePath(filename).name}, line {line})"


class EngineFiles:
    """The files that an engine consists of: those of the packages that its class and its bases come from."""

    def __init__(self, engine: LLMEngine) -> None:
        self.roots = frozenset(root for cls in author_class(engine).__mro__ for root in _roots_of(cls))
        self._prefixes = tuple(self.roots)
        self._known: dict[str, bool] = {}

    def __contains__(self, filename: str) -> bool:
        known = self._known.get(filename)
        if known is None:
            known = self._known[filename] = filename.startswith(self._prefixes)
        return known

    def innermost(self, frame: FrameType | None) -> FrameType | None:
        """Return the innermost frame of the engine's code, from this frame outwards to the event loop.

        Frames outside of the loop only wait for it: the script that runs the engine is one of them.
        """
        while frame is not None and frame.f_code.co_filename not in self:
            frame = None if frame.f_code in _LOOPS else frame.f_back
        return frame


def _roots_of(cls: type) -> list[str]:
    package = cls.__module__.partition(".")[0]
    if package in _FRAMEWORK_MODULES:
        return []
    try:
        file = inspect.getfile(cls)
    except (OSError, TypeError):
        # Made in an interactive session, say: its functions know their file all the same.
        codes = (getattr(value, "__code__", None) for value in vars(cls).values())
        return [code.co_filename for code in codes if code is not None]
    path = Path(file)
    top: Path | None = None
    for folder in path.parents:
        if not (folder / "__init__.py").exists():
            break
        top = folder
    return [file] if top is None else [f"{top}/"]
