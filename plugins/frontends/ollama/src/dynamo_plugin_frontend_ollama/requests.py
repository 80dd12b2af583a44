"""Requests of Ollama's API: their fields, and the checks that need no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from dynamo_core.errors import InvalidArgument
from dynamo_generation.bodies.decode import NOT_EMPTY, to_struct
from dynamo_generation.requests import fields
from dynamo_generation.requests.generation_request import I64, invalid

#: Of all routes of Ollama's API. Models stay with their workers.
EMBED_PASSIVE: Mapping[str, fields.Accepts] = {"keep_alive": fields.anything}

CHAT_PASSIVE: Mapping[str, fields.Accepts] = {
    **EMBED_PASSIVE,
    "logprobs": fields.OneOf(None, False),
    "shift": fields.anything,  # the context is never shifted here
    "top_logprobs": fields.OneOf(None, 0),
    "truncate": fields.anything,  # a prompt that is too long is refused with either
}

GENERATE_PASSIVE: Mapping[str, fields.Accepts] = {
    **CHAT_PASSIVE,
    "context": fields.anything,  # tokens of an earlier answer; none here has them
    "suffix": fields.OneOf(None, ""),
    "template": fields.OneOf(None, ""),  # the template is the model's own
}

#: Of the `options` of that API. Most of those without effect say how a server loads a model.
OPTIONS_PASSIVE: Mapping[str, fields.Accepts] = {
    **dict.fromkeys(
        (
            *("embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu"),
            *("num_keep", "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only"),
            # Penalties look at all tokens; the others are of mirostat.
            *("repeat_last_n", "mirostat_eta", "mirostat_tau"),
        ),
        fields.anything,
    ),
    "mirostat": fields.OneOf(None, 0),
    "penalize_newline": fields.OneOf(None, True),
    "tfs_z": fields.OneOf(None, 1, 1.0),
    "typical_p": fields.OneOf(None, 1, 1.0),
}


class OllamaFunction(msgspec.Struct, kw_only=True):
    """A function call of an earlier answer."""

    name: str
    arguments: dict[str, Any] | None = None


class OllamaCall(msgspec.Struct, kw_only=True):
    """A call in a message of the assistant. Most clients know no ids."""

    function: OllamaFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    """A message of the conversation; `images` are base64."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaOptions(msgspec.Struct, kw_only=True):
    """Sampling and stop options. A `num_predict` below 1 is no limit, a negative `seed` is none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: I64 | None = None
    num_predict: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class _Asking(msgspec.Struct, kw_only=True):
    model: Annotated[str, NOT_EMPTY]
    stream: bool | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None


class OllamaChatRequest(_Asking, kw_only=True):
    """A conversation to be answered. Without messages it asks for the model to be loaded."""

    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(_Asking, kw_only=True):
    """A prompt to be answered; with `raw` as it is, without the chat template."""

    prompt: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    """Texts to be embedded. Unless `truncate` is false, those that are too long are cut."""

    model: Annotated[str, NOT_EMPTY]
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, msgspec.Meta(le=2**31 - 1)] | None = None
    options: OllamaOptions | None = None


class OllamaEmbeddingsRequest(msgspec.Struct, kw_only=True):
    """A text to be embedded, as older clients ask for it."""

    model: Annotated[str, NOT_EMPTY]
    prompt: str | None = None
    options: OllamaOptions | None = None


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    """The requested model; `name` is its older form."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: dict[str, Any] | None = None


RequestT = TypeVar("RequestT", bound=msgspec.Struct)


def parse(
    raw: dict[str, Any], kind: type[RequestT], passive: Mapping[str, fields.Accepts], *, ignore: bool = False
) -> tuple[RequestT, list[str]]:
    """Check a request of this kind, of which `passive` is the table of fields without effect.

    Also returns the unknown options, which are left out with `ignore`. Ranges are checked when it is a chat request.

    Raises:
        InvalidArgument: naming the field.
    """
    request = to_struct(raw, kind)
    fields.refuse_fields(raw, request.__struct_fields__, passive)
    options = raw.get("options") or {}
    known = OllamaOptions.__struct_fields__
    unknown = {name for name in options if name not in known and name not in OPTIONS_PASSIVE}
    given = {name: value for name, value in options.items() if name not in unknown} if ignore else options
    try:
        fields.refuse_fields(given, known, OPTIONS_PASSIVE)
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field=f"options.{error.field}", cause=error) from error
    return request, [f"options.{name}" for name in options if name in unknown]


def check_generate(request: OllamaGenerateRequest) -> None:
    """Check what goes together.

    Raises:
        InvalidArgument: naming the field.
    """
    if request.raw and request.system:
        raise invalid("raw prompts have no system: it belongs into the prompt", "system")
