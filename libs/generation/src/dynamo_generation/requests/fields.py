"""Fields of the official APIs that are accepted without effect, or only with neutral values.

Those of chat and text completions are here, those of an API of its own with its requests.

Without effect is what does not change the meaning of an answer: who asks, how it is billed, hints for caches. A field
that would change it, and cannot be honoured, is refused with any value that asks for something. Engines that take the
client's body (`model_input: text`) get these fields as they are, and honour them or not by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from dynamo_core.errors import InvalidArgument
from dynamo_core.protocol import truncated

from dynamo_generation.bodies import limits

Accepts: TypeAlias = Callable[[Any], bool]


def anything(value: Any) -> bool:
    """Accept every value."""
    return True


class OneOf:
    """Accepts these values only."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __call__(self, value: Any) -> bool:
        return any(value is known or (type(value) is type(known) and value == known) for known in self.values)


class Text:
    """Accepts a text of so many characters."""

    def __init__(self, most: int) -> None:
        self.schema = {"type": ["string", "null"], "maxLength": most}
        self._most = most

    def __call__(self, value: Any) -> bool:
        return value is None or (isinstance(value, str) and len(value) <= self._most)


class Notes:
    """Accepts pairs of texts; how many, `requests.limits` says."""

    schema: Mapping[str, Any] = {
        "type": ["object", "null"],
        "maxProperties": limits.MAX_PAIRS,
        "propertyNames": {"maxLength": limits.MAX_KEY},
        "additionalProperties": {"type": ["string", "null"], "maxLength": limits.MAX_VALUE},
    }

    def __call__(self, value: Any) -> bool:
        return value is None or isinstance(value, dict)


class Documented(OneOf):
    """Accepts every value that the official API documents, and null; none has an effect."""

    def __init__(self, *values: Any) -> None:
        super().__init__(None, *values)


class ListOf:
    """Accepts a list of these values; none has an effect."""

    def __init__(self, *values: str) -> None:
        self.schema = {"type": ["array", "null"], "items": {"enum": list(values)}}
        self._values = frozenset(values)

    def __call__(self, value: Any) -> bool:
        return value is None or (
            isinstance(value, list) and all(isinstance(each, str) and each in self._values for each in value)
        )


#: For fields that would change an answer, and are only accepted empty.
NOTHING = OneOf(None)


def schema_of(accepts: Accepts) -> dict[str, Any]:
    """Return what such a field may hold, as a JSON Schema."""
    if isinstance(accepts, Text | Notes | ListOf):
        return dict(accepts.schema)
    return {"enum": list(accepts.values)} if isinstance(accepts, OneOf) else {}


def has_no_effect(accepts: Accepts) -> bool:
    """Return whether every value that is accepted may ask for something, which then is not done."""
    return isinstance(accepts, Documented) or not isinstance(accepts, OneOf)


#: Fields of both kinds of request.
COMMON: dict[str, Accepts] = {
    "metadata": Notes(),  # the client's own
    "safety_identifier": Text(limits.MAX_CHARACTERS["safety_identifier"]),  # identifies the end user
    "prompt_cache_key": Text(
        limits.MAX_CHARACTERS["prompt_cache_key"]
    ),  # a hint for a cache that finds its prefixes by content here
    "prompt_cache_retention": anything,
    "prompt_cache_options": anything,
    "service_tier": Documented("auto", "default", "flex", "scale", "priority", "fast"),
    "store": Documented(False, True),  # there is no store; the answer is the same
    # Beyond the OpenAI API, as clients of vLLM send them.
    "bad_words": OneOf(None, []),
    "detokenize": OneOf(None, True),
    "kv_transfer_params": NOTHING,
    "length_penalty": OneOf(None, 1, 1.0),
    "logits_processors": OneOf(None, []),
    "prompt_logprobs": NOTHING,
    "request_id": NOTHING,  # the header x-request-id does it
    "return_tokens_as_token_ids": OneOf(None, False),
    "spaces_between_special_tokens": OneOf(None, True),
    "truncate_prompt_tokens": NOTHING,
    "use_beam_search": OneOf(None, False),
    "vllm_xargs": OneOf(None, {}),
}

CHAT: Mapping[str, Accepts] = {
    **COMMON,
    "add_special_tokens": OneOf(None, False),  # the template writes them
    "audio": NOTHING,
    "documents": OneOf(None, []),
    "echo": OneOf(None, False),
    "function_call": OneOf(None, "none", "auto"),
    "functions": OneOf(None, []),
    "include_reasoning": OneOf(None, True),
    "mm_processor_kwargs": OneOf(None, {}),
    "modalities": OneOf(None, ["text"]),
    "moderation": NOTHING,
    "prediction": anything,  # only makes an answer faster
    "verbosity": Documented("low", "medium", "high"),
    "web_search_options": NOTHING,
}

COMPLETIONS: Mapping[str, Accepts] = {
    **COMMON,
    "suffix": NOTHING,
}

#: Fields of other servers that change the meaning of an answer: they are refused even where unknown fields are ignored.
NEVER_IGNORED = frozenset({"chat_template"})

#: Names of unknown fields that an error lists.
_NAMED = 20


def check_fields(
    raw: Mapping[str, Any], known: tuple[str, ...], passive: Mapping[str, Accepts]
) -> InvalidArgument | None:
    """Refuse names that are neither known nor in the table of passive fields.

    Returns:
        The refusal of the first passive field with a value that asks for something; None if there is none.

    Raises:
        InvalidArgument: naming all unknown fields.
    """
    unknown: list[str] = []
    refusal: InvalidArgument | None = None
    for name, value in raw.items():
        accepts = passive.get(name)
        if accepts is None:
            if name not in known:
                unknown.append(name)
        elif refusal is None and not accepts(value):
            refusal = InvalidArgument(f"Unsupported value of parameter `{name}`", field=name)
    if "chat_template" in unknown:
        raise InvalidArgument(
            "Unsupported parameter(s): `chat_template`. The template is the model's own", field="chat_template"
        )
    if unknown:
        names = ", ".join(f"`{truncated(name)}`" for name in unknown[:_NAMED])
        more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
        raise InvalidArgument(f"Unsupported parameter(s): {names}{more}", field=truncated(unknown[0]))
    return refusal


def refuse_fields(raw: Mapping[str, Any], known: tuple[str, ...], passive: Mapping[str, Accepts]) -> None:
    """Refuse unknown names, and passive fields with values that ask for something.

    Raises:
        InvalidArgument: naming all unknown fields, or the first passive one.
    """
    raise_found(check_fields(raw, known, passive))


def raise_found(fault: InvalidArgument | None) -> None:
    """Raise a fault that was found earlier, if there is one.

    It raises a copy: an error that a frame of its own traceback refers to would keep the body until a collection.

    Raises:
        InvalidArgument: naming the field.
    """
    if fault is not None:
        raise InvalidArgument(fault.message, field=fault.field)
