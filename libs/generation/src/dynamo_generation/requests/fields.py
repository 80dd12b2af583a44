"""Fields of the official APIs that this frontend accepts without effect, or only with values that ask for nothing.

Without effect is what does not change the meaning of an answer: who asks, how it is billed, hints for caches. A field
that would change it, and cannot be honoured, is refused with any value that asks for something. Engines that take the
client's body (`model_input: text`) get these fields as they are, and honour them or not by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from dynamo_core.errors import InvalidArgument
from dynamo_core.protocol import shown

from dynamo_generation.bodies import limits

Accepts: TypeAlias = Callable[[Any], bool]


def _anything(value: Any) -> bool:
    return True


class _OneOf:
    """Accepts these values only."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __call__(self, value: Any) -> bool:
        return any(value is known or (type(value) is type(known) and value == known) for known in self.values)


class _Text:
    """Accepts a text of so many characters."""

    def __init__(self, most: int) -> None:
        self.schema = {"type": ["string", "null"], "maxLength": most}
        self._most = most

    def __call__(self, value: Any) -> bool:
        return value is None or (isinstance(value, str) and len(value) <= self._most)


class _Notes:
    """Accepts pairs of texts; how many, `requests.limits` says."""

    schema: Mapping[str, Any] = {
        "type": ["object", "null"],
        "maxProperties": limits.MAX_PAIRS,
        "propertyNames": {"maxLength": limits.MAX_KEY},
        "additionalProperties": {"type": ["string", "null"], "maxLength": limits.MAX_VALUE},
    }

    def __call__(self, value: Any) -> bool:
        return value is None or isinstance(value, dict)


class _Documented(_OneOf):
    """Accepts every value that the official API documents, and null; none has an effect."""

    def __init__(self, *values: Any) -> None:
        super().__init__(None, *values)


class _ListOf:
    """Accepts a list of these values; none has an effect."""

    def __init__(self, *values: str) -> None:
        self.schema = {"type": ["array", "null"], "items": {"enum": list(values)}}
        self._values = frozenset(values)

    def __call__(self, value: Any) -> bool:
        return value is None or (
            isinstance(value, list) and all(isinstance(each, str) and each in self._values for each in value)
        )


_one_of = _OneOf
_nothing = _OneOf(None)


def schema_of(accepts: Accepts) -> dict[str, Any]:
    """What such a field may hold, as a JSON Schema."""
    if isinstance(accepts, _Text | _Notes | _ListOf):
        return dict(accepts.schema)
    return {"enum": list(accepts.values)} if isinstance(accepts, _OneOf) else {}


def has_no_effect(accepts: Accepts) -> bool:
    """Whether every value that is accepted may ask for something, which then is not done."""
    return isinstance(accepts, _Documented) or not isinstance(accepts, _OneOf)


#: Fields of both kinds of request.
_COMMON: dict[str, Accepts] = {
    "metadata": _Notes(),  # the client's own
    "safety_identifier": _Text(limits.MAX_CHARACTERS["safety_identifier"]),  # identifies the end user
    "prompt_cache_key": _Text(
        limits.MAX_CHARACTERS["prompt_cache_key"]
    ),  # a hint for a cache that finds its prefixes by content here
    "prompt_cache_retention": _anything,
    "prompt_cache_options": _anything,
    "service_tier": _Documented("auto", "default", "flex", "scale", "priority", "fast"),
    "store": _Documented(False, True),  # there is no store; the answer is the same
    # Beyond the OpenAI API, as clients of vLLM send them.
    "bad_words": _one_of(None, []),
    "detokenize": _one_of(None, True),
    "kv_transfer_params": _nothing,
    "length_penalty": _one_of(None, 1, 1.0),
    "logits_processors": _one_of(None, []),
    "prompt_logprobs": _nothing,
    "request_id": _nothing,  # the header x-request-id does it
    "return_tokens_as_token_ids": _one_of(None, False),
    "spaces_between_special_tokens": _one_of(None, True),
    "truncate_prompt_tokens": _nothing,
    "use_beam_search": _one_of(None, False),
    "vllm_xargs": _one_of(None, {}),
}

CHAT: Mapping[str, Accepts] = {
    **_COMMON,
    "add_special_tokens": _one_of(None, False),  # the template writes them
    "audio": _nothing,
    "documents": _one_of(None, []),
    "echo": _one_of(None, False),
    "function_call": _one_of(None, "none", "auto"),
    "functions": _one_of(None, []),
    "include_reasoning": _one_of(None, True),
    "mm_processor_kwargs": _one_of(None, {}),
    "modalities": _one_of(None, ["text"]),
    "moderation": _nothing,
    "prediction": _anything,  # only makes an answer faster
    "verbosity": _Documented("low", "medium", "high"),
    "web_search_options": _nothing,
}

COMPLETIONS: Mapping[str, Accepts] = {
    **_COMMON,
    "suffix": _nothing,
}

EMBEDDINGS: Mapping[str, Accepts] = {}

#: Of scores and sorted documents, as clients of vLLM, Jina and Cohere send them.
SCORING: Mapping[str, Accepts] = {
    "activation": _one_of(None, True),
    "add_special_tokens": _one_of(None, True),
    "cache_salt": _nothing,
    "chat_template_kwargs": _one_of(None, {}),
    "encoding_format": _one_of(None, "float"),
    "instruction": _nothing,
    "max_chunks_per_doc": _nothing,
    "mm_processor_kwargs": _one_of(None, {}),
    "priority": _one_of(None, 0),
    "rank_fields": _one_of(None, [], ["text"]),  # a document has no other field
    "request_id": _nothing,  # the header x-request-id does it
    "return_embeddings": _one_of(None, False),
    "truncation_side": _one_of(None, "right"),
    "use_activation": _one_of(None, True),
}

#: Of both Anthropic routes.
COUNT_TOKENS: Mapping[str, Accepts] = {
    "billing_policy": _anything,
    "cache_control": _anything,  # a hint for a cache that finds its prefixes by content here
    "compaction": _anything,  # the context is never changed here, as below
    "context_management": _anything,  # no edit is applied, and the answer says so
    "mcp_servers": _one_of(None, []),
    "speed": _Documented("standard", "fast"),
    "thread": _nothing,
    "user_profile_id": _anything,
    "workspace_id": _anything,
}

MESSAGES: Mapping[str, Accepts] = {
    **COUNT_TOKENS,
    "container": _nothing,
    "diagnostics": _anything,  # asks why a cache did not help; there is nothing to say
    "fallback_credit_token": _anything,
    "fallbacks": _anything,  # for refusals of the first model; models here do not refuse
    "inference_geo": _nothing,
    "metadata": _Notes(),  # identifies the end user; nothing here acts on it
    "service_tier": _Documented("auto", "standard_only"),
}

#: Of all routes of Ollama's API. Models stay with their workers.
OLLAMA_EMBED: Mapping[str, Accepts] = {"keep_alive": _anything}

OLLAMA_CHAT: Mapping[str, Accepts] = {
    **OLLAMA_EMBED,
    "logprobs": _one_of(None, False),
    "shift": _anything,  # the context is never shifted here
    "top_logprobs": _one_of(None, 0),
    "truncate": _anything,  # a prompt that is too long is refused with either
}

OLLAMA_GENERATE: Mapping[str, Accepts] = {
    **OLLAMA_CHAT,
    "context": _anything,  # tokens of an earlier answer; none here has them
    "suffix": _one_of(None, ""),
    "template": _one_of(None, ""),  # the template is the model's own
}

#: Of the `options` of that API. Most of those without effect say how a server loads a model.
OLLAMA_OPTIONS: Mapping[str, Accepts] = {
    **dict.fromkeys(
        (
            *("embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu"),
            *("num_keep", "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only"),
            # Penalties look at all tokens; the others are of mirostat.
            *("repeat_last_n", "mirostat_eta", "mirostat_tau"),
        ),
        _anything,
    ),
    "mirostat": _one_of(None, 0),
    "penalize_newline": _one_of(None, True),
    "tfs_z": _one_of(None, 1, 1.0),
    "typical_p": _one_of(None, 1, 1.0),
}

RESPONSES: Mapping[str, Accepts] = {
    "access_programs": _anything,
    "background": _one_of(None, False),
    "client_metadata": _anything,  # the client's own, as Codex sends it
    "context_management": _anything,  # the context is never compacted here
    "conversation": _nothing,
    "image": _anything,  # how pictures are made; there are none
    # Parts of answers that are not made here, but for the encrypted reasoning, which is, and the log-probabilities,
    # which are refused.
    "include": _ListOf(
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    ),
    "max_tool_calls": _anything,  # counts calls of tools that a server runs itself; there are none
    "moderation": _nothing,
    "previous_response_id": _nothing,
    "prompt": _nothing,
    "prompt_cache_key": _COMMON["prompt_cache_key"],
    "prompt_cache_options": _anything,
    "prompt_cache_retention": _anything,
    "safety_identifier": _COMMON["safety_identifier"],
    "service_tier": _COMMON["service_tier"],
    "store": _COMMON["store"],
    "top_logprobs": _one_of(None, 0),
    "truncation": _Documented("auto", "disabled"),  # a prompt that is too long is refused with either
}

INPUT_TOKENS: Mapping[str, Accepts] = {
    "conversation": _nothing,
    "personality": _anything,  # one of the makers of the API's own models
    "previous_response_id": _nothing,
    "truncation": RESPONSES["truncation"],
}

#: Where a store holds earlier responses these are no longer passive.
_REMEMBERED = frozenset({"conversation", "previous_response_id", "store"})
REMEMBERED_RESPONSES: Mapping[str, Accepts] = {
    name: accepts for name, accepts in RESPONSES.items() if name not in _REMEMBERED
}
REMEMBERED_INPUT_TOKENS: Mapping[str, Accepts] = {
    name: accepts for name, accepts in INPUT_TOKENS.items() if name not in _REMEMBERED
}

TOKENIZE: Mapping[str, Accepts] = {
    "chat_template": _nothing,
    "mm_processor_kwargs": _nothing,
}

DETOKENIZE: Mapping[str, Accepts] = {}


#: Fields of other servers that change the meaning of an answer: they are refused even where unknown fields are ignored.
NEVER_IGNORED = frozenset({"chat_template"})

#: Names of unknown fields that an error lists.
_NAMED = 20


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
        names = ", ".join(f"`{shown(name)}`" for name in unknown[:_NAMED])
        more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
        raise InvalidArgument(f"Unsupported parameter(s): {names}{more}", field=shown(unknown[0]))


def check_passive(raw: Mapping[str, Any], passive: Mapping[str, Accepts]) -> None:
    """Refuses fields of the table with values that ask for something.

    Raises:
        InvalidArgument: naming the first.
    """
    for name, value in raw.items():
        accepts = passive.get(name)
        if accepts is not None and not accepts(value):
            raise InvalidArgument(f"Unsupported value of parameter `{name}`", field=name)
