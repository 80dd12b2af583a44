"""Fields of the OpenAI API that this frontend accepts only with values that ask for nothing.

A field with any other value is refused, so that no wish is silently dropped. Engines that take the client's body
(`model_input: text`) get these fields as they are, and honour them or not by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from dynamo_core.errors import InvalidArgument

Accepts: TypeAlias = Callable[[Any], bool]


def _anything(value: Any) -> bool:
    return True


def _nothing(value: Any) -> bool:
    return value is None


def _one_of(*values: Any) -> Accepts:
    def accepts(value: Any) -> bool:
        return any(value is known or (type(value) is type(known) and value == known) for known in values)

    return accepts


#: Fields of both kinds of request.
_COMMON: dict[str, Accepts] = {
    "metadata": _anything,  # the client's own notes
    "safety_identifier": _anything,  # identifies the end user; nothing here acts on it
    "prompt_cache_key": _anything,  # a hint for a cache that finds its prefixes by content here
    "prompt_cache_retention": _anything,
    "service_tier": _one_of(None, "auto", "default"),
    "store": _one_of(None, False),
    "guided_json": _nothing,
    "guided_regex": _nothing,
    "guided_choice": _nothing,
    "guided_grammar": _nothing,
}

CHAT: Mapping[str, Accepts] = {
    **_COMMON,
    "audio": _nothing,
    "function_call": _one_of(None, "none", "auto"),
    "functions": _one_of(None, []),
    "modalities": _one_of(None, ["text"]),
    "parallel_tool_calls": _anything,  # says something only about tools, which are refused
    "prediction": _anything,  # only makes the same answer come sooner
    "reasoning_effort": _nothing,
    "response_format": _one_of(None, {"type": "text"}),
    "tool_choice": _one_of(None, "none", "auto"),
    "tools": _one_of(None, []),
    "verbosity": _nothing,
    "web_search_options": _nothing,
}

COMPLETIONS: Mapping[str, Accepts] = {
    **_COMMON,
    "best_of": _one_of(None, 1),
    "suffix": _nothing,
}

EMBEDDINGS: Mapping[str, Accepts] = {}


def check_known(raw: Mapping[str, Any], fields: tuple[str, ...], passive: Mapping[str, Accepts]) -> None:
    """Refuses names that are neither fields nor in the table.

    Raises:
        InvalidArgument: naming them all.
    """
    unknown = [name for name in raw if name not in fields and name not in passive]
    if "chat_template" in unknown:
        raise InvalidArgument(
            "Unsupported parameter(s): `chat_template`. The template is the model's own", field="chat_template"
        )
    if unknown:
        names = ", ".join(f"`{name}`" for name in unknown)
        raise InvalidArgument(f"Unsupported parameter(s): {names}", field=unknown[0])


def check_passive(raw: Mapping[str, Any], passive: Mapping[str, Accepts]) -> None:
    """Refuses fields of the table with values that ask for something.

    Raises:
        InvalidArgument: naming the first.
    """
    for name, value in raw.items():
        accepts = passive.get(name)
        if accepts is not None and not accepts(value):
            raise InvalidArgument(f"Unsupported value of parameter `{name}`", field=name)
