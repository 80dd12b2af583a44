"""Chat templates: from messages to the one text a model was trained on."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2
from dynamo_core.errors import InvalidArgument, Unknown
from dynamo_core.protocol.reading import Unreadable
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.runtime import new_context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dynamo_plugin_frontend_openai.requests.decode import object_of

if TYPE_CHECKING:
    from dynamo_core.contracts.frontend import ServedModel
    from jinja2.parser import Parser

#: For models without files: a line per message, then the beginning of the answer.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

_TEMPLATE_FILE = "chat_template.jinja"
_CONFIG_FILE = "tokenizer_config.json"
#: How many compiled templates are kept.
_KEPT = 64


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant said, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - the name and the form are jinja2's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The marked block, as if it were not marked."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. `tool_source` is for conversations with tools, if the model has a template of its own there.

    Raises:
        Unknown: the template is not a valid one; this is the model's fault, not the client's.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, tool_source: str | None = None
    ) -> None:
        self._variables = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
            self._tool_template = self._template
            if tool_source is not None:
                self._tool_template = _environment().from_string(tool_source)
        except jinja2.TemplateError as error:
            raise Unknown(f"the model's chat template is broken: {error}", cause=error) from error
        # `Template.render` gathers the globals anew each time, which takes as long as the rest of a short template.
        self._base = {**self._template.globals, **self._variables}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a conversation. `tools` are what the model may call, as the client sent them.

        Raises:
            InvalidArgument: the template refuses these messages, or cannot deal with them.
        """
        try:
            template = self._template if tools is None else self._tool_template
            values = {
                **self._base,
                **(variables or {}),
                "messages": messages,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
            }
            context = new_context(template.environment, template.name, template.blocks, values, shared=True)
            return "".join(template.root_render_func(context))
        except Exception as error:
            # Whatever goes wrong in a template that compiled comes from the values it was given.
            raise InvalidArgument(
                f"The chat template of the model refused the messages: {error}", field="messages", cause=error
            ) from error


class TemplateStore:
    """The templates of all models, each compiled once for each version of the model."""

    def __init__(self) -> None:
        self._templates: OrderedDict[tuple[str, str], ChatTemplate] = OrderedDict()

    def get(self, model: ServedModel) -> ChatTemplate:
        """The template of a model.

        Raises:
            InvalidArgument: the model has none, so it cannot chat.
            Unknown: its template is broken.
        """
        card = model.card
        key = (card.name, card.checksum)
        template = self._templates.get(key)
        if template is None:
            template = self._templates[key] = load_template(model)
            while len(self._templates) > _KEPT:
                self._templates.popitem(last=False)
        else:
            self._templates.move_to_end(key)
        return template


def load_template(model: ServedModel) -> ChatTemplate:
    """Reads and compiles the template of a model: the template file, else the one in the tokenizer's settings.

    Raises:
        InvalidArgument: the model has neither, so it cannot chat.
        Unknown: what it has is broken.
    """
    settings = _settings(model)
    special = {name: _token_text(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    tokens = {name: text for name, text in special.items() if text is not None}
    data = model.file(_TEMPLATE_FILE)
    if data is not None:
        return ChatTemplate(data.decode(errors="replace"), tokens)
    source, tool_source = _pick(settings.get("chat_template"))
    if source is not None:
        return ChatTemplate(source, tokens, tool_source)
    if model.card.tokenizer == "bytes" or model.card.model_input == "text":
        # An engine that takes text has its own template; here the prompt only estimates the load.
        return ChatTemplate(DEFAULT_TEMPLATE)
    raise InvalidArgument(
        f"Model '{model.name}' has no chat template. Use text completions, or set nvext.use_raw_prompt", field="model"
    )


def _settings(model: ServedModel) -> dict[str, Any]:
    data = model.file(_CONFIG_FILE)
    if data is None:
        return {}
    try:
        return object_of(data)
    except Unreadable as error:
        raise Unknown(f"{_CONFIG_FILE} of model {model.name!r} cannot be read: {error}", cause=error) from error


def _pick(value: Any) -> tuple[str | None, str | None]:
    """A template, or of a list of named ones the one called default; and the one for tools, if there is one."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value, tool_use = named.get("default", next(iter(named.values()), None)), named.get("tool_use")
        return value if isinstance(value, str) else None, tool_use if isinstance(tool_use, str) else None
    return value if isinstance(value, str) else None, None


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, autoescape=False, extensions=[LoopControlExtension, _Generation]
    )
    environment.filters["tojson"] = _tojson
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _raise, "strftime_now": time.strftime}
    environment.globals.update(helpers)
    return environment


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's own filter, which models have never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
