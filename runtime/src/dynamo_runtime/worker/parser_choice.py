"""The choice of a model's parsers: those named, or those that its folder indicates."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
from dynamo_core.contracts.engine import AUTO_PARSER, NO_PARSER, WorkerConfig
from dynamo_core.contracts.model_folder import (
    CHAT_TEMPLATE,
    CHAT_TEMPLATE_JSON,
    MODEL_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOOL_TEMPLATE,
)
from dynamo_core.contracts.parsers import ModelText, ReasoningParser, ToolCallParser
from dynamo_core.protocol.decoding import Unreadable, read, read_json

log = logging.getLogger(__name__)

ParserType: TypeAlias = type[ToolCallParser] | type[ReasoningParser]

#: The keys of a model's section that pick its parsers.
TOOL_KEY, REASONING_KEY = "tool_call_parser", "reasoning_parser"


class Candidates(NamedTuple):
    """The parsers that `auto` may choose from. `missing` says why there are none, where a plugin is not there."""

    tools: Sequence[ParserType] = ()
    reasoning: Sequence[ParserType] = ()
    missing: str = ""


class ChosenParser(NamedTuple):
    """The name of a parser, or None, and why it is that one. `fits` are the candidates where there are too many."""

    name: str | None
    reason: str
    fits: Mapping[str, str] = {}


class ParserChoice(NamedTuple):
    """The parsers of a model."""

    tools: ChosenParser = ChosenParser(None, "")
    reasoning: ChosenParser = ChosenParser(None, "")


NO_CHOICE = ParserChoice()


class _AddedToken(msgspec.Struct):
    content: str = ""


class _AddedTokens(msgspec.Struct):
    """The part of a ``tokenizer.json`` that is of interest; the rest is skipped while it is read."""

    added_tokens: list[_AddedToken] = []


_tokenizers = msgspec.json.Decoder(_AddedTokens)


def choose_parsers(
    config: WorkerConfig, files: Mapping[str, bytes], candidates: Candidates, *, parsed: bool = True
) -> ParserChoice:
    """Return the parsers for a worker's model, from the files of its folder. May take a while: call it in a thread.

    `parsed`: whether the engine leaves its answers to be parsed; `auto` is none otherwise.
    """
    settings = (config.tool_call_parser, config.reasoning_parser)
    if not parsed:
        candidates = Candidates(missing="the engine gives text")
    model = model_text(files) if AUTO_PARSER in settings and not candidates.missing else _NO_TEXT
    return ParserChoice(
        _choose(config.tool_call_parser, candidates.tools, candidates.missing, model),
        _choose(config.reasoning_parser, candidates.reasoning, candidates.missing, model),
    )


def log_choice(worker: str, choice: ParserChoice) -> None:
    """Tell the operator what a worker's answers are read with, and warn where more than one parser fits."""
    if choice.tools == choice.reasoning:
        log.info("worker %s: its answers are not parsed: %s", worker, choice.tools.reason)
        return
    for key, what, chosen in (
        (TOOL_KEY, "calls of tools", choice.tools),
        (REASONING_KEY, "reasoning", choice.reasoning),
    ):
        if chosen.fits:
            log.warning("worker %s: %s", worker, ambiguity(worker, key, chosen))
        else:
            log.info("worker %s: the parser of %s is %s: %s", worker, what, chosen.name or NO_PARSER, chosen.reason)


def ambiguity(worker: str, key: str, chosen: ChosenParser) -> str:
    """Return what an operator can do where more than one parser fits."""
    fits = ", ".join(f"{name} ({reason})" for name, reason in chosen.fits.items())
    return (
        f"{key} is {AUTO_PARSER}, and more than one parser fits, so that none is used: {fits}; "
        f"set workers.{worker}.model.{key} to one of them, or to {NO_PARSER}"
    )


def model_text(files: Mapping[str, bytes]) -> ModelText:
    """Return what the files of a model's folder say of how it writes. Unreadable files say nothing."""
    settings = _object(files, TOKENIZER_CONFIG)
    return ModelText(
        template=_template(files, settings),
        special_tokens=_added_tokens(files.get(TOKENIZER, b"{}")),
        tokenizer_config=settings,
        model_config=_object(files, MODEL_CONFIG),
    )


_NO_TEXT = ModelText("", frozenset(), {}, {})


def _choose(setting: str | None, candidates: Sequence[ParserType], missing: str, model: ModelText) -> ChosenParser:
    if setting is None or setting == NO_PARSER:
        return ChosenParser(None, "it is switched off")
    if setting != AUTO_PARSER:
        return ChosenParser(setting, "it is named")
    if missing:
        return ChosenParser(None, missing)
    described, known = ([cls for cls in candidates if cls.DESCRIBED is wanted] for wanted in (True, False))
    fits = _fitting(described, model) or _fitting(known, model)
    if len(fits) == 1:
        [(name, reason)] = fits.items()
        return ChosenParser(name, reason)
    if fits:
        return ChosenParser(None, f"more than one fits: {', '.join(fits)}", fits)
    return ChosenParser(None, "the model has no chat template" if not model.template else "none fits its template")


def _fitting(candidates: Sequence[ParserType], model: ModelText) -> dict[str, str]:
    return {cls.NAME: reason for cls in candidates if (reason := _recognized(cls, model))}


def _recognized(cls: ParserType, model: ModelText) -> str | None:
    try:
        return cls.recognizes(model)
    except Exception:
        log.exception("parser %s cannot tell whether it fits the model", cls.NAME)
        return None


def _template(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> str:
    """Return the templates that may be used: those of the files, else those in the settings of the tokenizer."""
    texts = [files[name].decode(errors="replace") for name in (CHAT_TEMPLATE, TOOL_TEMPLATE) if name in files]
    return "\n".join(texts if CHAT_TEMPLATE in files else [_listed_template(files, settings), *texts])


def _listed_template(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> str:
    value = settings.get("chat_template") or _object(files, CHAT_TEMPLATE_JSON).get("chat_template")
    if isinstance(value, list):
        named = (item.get("template") for item in value if isinstance(item, dict))
        return "\n".join(text for text in named if isinstance(text, str))
    return value if isinstance(value, str) else ""


def _added_tokens(data: bytes) -> frozenset[str]:
    try:
        return frozenset(token.content for token in read(_tokenizers, data).added_tokens)
    except Unreadable:
        return frozenset()


def _object(files: Mapping[str, bytes], name: str) -> Mapping[str, Any]:
    try:
        value = read_json(files.get(name, b"{}"))
    except Unreadable:
        return {}
    return value if isinstance(value, dict) else {}
