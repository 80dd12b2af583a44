"""Chat templates: from messages to the one text a model was trained on."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from dynamo_core import DynamoError
from dynamo_core.errors import InvalidArgument, Unknown
from dynamo_core.protocol import Unreadable

from dynamo_generation.bodies.decode import object_of
from dynamo_generation.requests.thinking import ThinkingVariables
from dynamo_generation.templates.absent_content import asks_for_none
from dynamo_generation.templates.detection import (
    Detection,
    detect_forms,
    reasoning_names,
    run_detection,
)
from dynamo_generation.templates.errors import TemplateFault
from dynamo_generation.templates.forms import TemplateForms
from dynamo_generation.templates.inline_rendering import (
    SECONDS,
    PlainTemplate,
    RenderLimitExceeded,
    bounded_environment,
)
from dynamo_generation.templates.plain_templates import is_plain
from dynamo_generation.templates.render_processes import TemplateProcesses, refused

if TYPE_CHECKING:
    from dynamo_core import ServedModel

log = logging.getLogger(__name__)

#: For models without files: a line per message, then the beginning of the answer.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

_TEMPLATE_FILE = "chat_template.jinja"
#: Beside that file, or beside what the settings have.
_TOOL_TEMPLATE_FILE = "tool_use.jinja"
_CONFIG_FILE = "tokenizer_config.json"
#: Of models that read pictures too.
_PROCESSOR_FILE = "chat_template.json"
_SPECIAL_TOKENS_FILE = "special_tokens_map.json"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: How many compiled templates are kept.
_KEPT = 64
#: Seconds for which a template that took long is not tried on the event loop again.
_APART = 10.0
#: Seconds that a template may take for a conversation when it is only described.
_DESCRIBED = 5.0
#: Characters of a template; those of models have a few thousand.
_MAX_SOURCE = 256 * 1024


class ChatTemplate:
    """A template that has been looked through; `name` is how messages call it.

    `tool_source` is for conversations with tools, if the model has a template of its own there.

    Raises:
        Unknown: the template is not a valid one; this is the model's fault, not the client's.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
        *,
        name: str = "The chat template",
    ) -> None:
        self.name = name
        #: Until when it is not tried on the event loop, as `time.monotonic` has it.
        self.apart_until = 0.0
        self._variables = dict(special_tokens or {})
        self._form = _Form(source)
        self._tool_form = self._form if tool_source is None else _Form(tool_source)
        #: By whether there are tools. None until they are detected.
        self._forms: dict[bool, TemplateForms] = {}

    def keep_apart(self) -> None:
        """Keep a short conversation that took long off the event loop for a while."""
        self.apart_until = time.monotonic() + _APART

    def values(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """Return the variables of a conversation. `tools` are what the model may call, as the client sent them."""
        # Templates are written for a library that always has these, some as none.
        return {
            "documents": None,
            **self._variables,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }

    def source(self, *, tools: bool) -> str:
        """Return the source of the template for conversations with or without tools."""
        return self._form_of(tools).source

    def thinking(self, *, tools: bool) -> ThinkingVariables:
        """Return which variables turn thinking on and off in conversations with or without tools."""
        return self._form_of(tools).thinking

    def forms(self, *, tools: bool) -> TemplateForms:
        """Return the forms of messages that the template reads in conversations with or without tools."""
        return self._forms.get(tools) or self._form_of(tools).forms

    def detect(self, tools: bool) -> Detection:
        """Begin to find the forms of conversations with or without tools."""
        return detect_forms(self._form_of(tools).forms, tools=tools)

    def detected(self, tools: bool, forms: TemplateForms) -> None:
        """Set the forms of conversations with or without tools."""
        self._forms[tools] = forms

    def detect_now(self) -> bool:
        """Find the forms; return whether that took hardly any time, else they are not known. Takes a moment."""

        def render(messages: list[dict[str, Any]], shown: Sequence[dict[str, Any]] | None) -> str | None:
            try:
                return self.render(self.values(messages, tools=shown))
            except InvalidArgument:
                return None

        try:
            for tools in (False, True):
                self.detected(tools, run_detection(self.detect(tools), render))
        except RenderLimitExceeded:
            return False
        return True

    def _form_of(self, tools: bool) -> _Form:
        return self._tool_form if tools else self._form

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the text of a conversation, if that takes hardly any time.

        Raises:
            RenderLimitExceeded: it takes longer.
            InvalidArgument: the template refuses these messages, or cannot deal with them.
        """
        plain = (self._form if values["tools"] is None else self._tool_form).plain
        if plain is None:
            raise RenderLimitExceeded
        try:
            return plain.render(values)
        except RenderLimitExceeded:
            raise
        except Exception as error:
            # Whatever goes wrong in a template that compiled comes from the values it was given.
            raise refused(error) from error


class _Form:
    """A template of a model; compiled if it may be rendered on the event loop."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.plain: PlainTemplate | None = None
        #: What the source tells of them.
        self.forms = TemplateForms()
        self.thinking = ThinkingVariables()
        if len(source) > _MAX_SOURCE:
            raise Unknown(f"the model's chat template is broken: it has more than {_MAX_SOURCE} characters")
        environment = bounded_environment()
        try:
            parsed = environment.parse(source)
            no_content = None if asks_for_none(parsed) else ""
            self.forms = TemplateForms(no_content=no_content, reasoning=reasoning_names(parsed))
            self.thinking = ThinkingVariables.of(source, parsed)
            if is_plain(parsed, environment):
                self.plain = PlainTemplate(environment.from_string(parsed))
        except Exception as error:
            # Also errors of Python: a template may be nested more deeply than its compiler can bear.
            raise Unknown(f"the model's chat template is broken: {error}", cause=error) from error


class TemplateStore:
    """The compiled templates of all models, one per version of a model, and their renderers.

    `timeout` is the seconds that one may take.
    """

    def __init__(self, timeout: float) -> None:
        self._templates: OrderedDict[tuple[str, str], ChatTemplate] = OrderedDict()
        self._loading: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._compiling = asyncio.Lock()
        self._processes = TemplateProcesses(timeout)

    def known(self, model: ServedModel) -> ChatTemplate | None:
        """Return the template of a model, if it has been compiled."""
        card = model.card
        key = (card.name, card.checksum)
        template = self._templates.get(key)
        if template is not None:
            self._templates.move_to_end(key)
        return template

    async def load(self, model: ServedModel) -> ChatTemplate:
        """Return the template of a model, with the forms that it reads.

        Raises:
            InvalidArgument: the model has none, so it cannot chat.
            Unknown: its template is broken.
            Unavailable: too many conversations wait to be rendered.
        """
        key = (model.card.name, model.card.checksum)
        # Once, as many requests may ask for the first time.
        async with self._loading.setdefault(key, asyncio.Lock()):
            template = self.known(model)
            if template is None:
                # In a thread, and one after the other, as a large one takes a second.
                async with self._compiling:
                    template = await asyncio.to_thread(load_template, model)
                await self.detect(template)
        self._templates[key] = template
        while len(self._templates) > _KEPT:
            self._templates.popitem(last=False)
        return template

    async def detect(self, template: ChatTemplate) -> None:
        """Find the forms of messages that a template reads: in a thread, or if it may take long in a process.

        Raises:
            Unknown: it is broken.
            Unavailable: too many conversations wait to be rendered.
        """
        if await asyncio.to_thread(template.detect_now):
            return
        for tools in (False, True):
            detection = template.detect(tools)
            try:
                messages, shown = next(detection)
                while True:
                    values = partial(template.values, messages, tools=shown)
                    try:
                        prompt = await self.render(template, values, tools=tools, long=True)
                    except InvalidArgument:
                        prompt = None
                    messages, shown = detection.send(prompt)
            except StopIteration as end:
                template.detected(tools, end.value)
            except TemplateFault as fault:
                log.warning("the forms that messages need are not known: %s", fault)
                return

    def render_now(self, template: ChatTemplate, values: Mapping[str, Any]) -> str | None:
        """Return the text of a conversation; None if it is to be rendered in a process of its own.

        Raises:
            InvalidArgument: the template refuses these messages, or cannot deal with them.
        """
        if template.apart_until and time.monotonic() < template.apart_until:
            return None
        try:
            return template.render(values)
        except RenderLimitExceeded:
            log.debug("%s is rendered in a process of its own", template.name)
            return None

    async def render(
        self, template: ChatTemplate, values: Callable[[], dict[str, Any]], *, tools: bool, long: bool
    ) -> str:
        """Return the text of a conversation, however long. A thread calls `values` for the variables.

        `tools` says whether there are tools among them, `long` whether it may well take long.

        Raises:
            InvalidArgument: the template refuses these messages, or cannot deal with them.
            TemplateFault: it takes too long, or too much memory.
            Unknown: it is broken.
            Unavailable: too many conversations wait to be rendered.
        """
        try:
            text, seconds = await self._processes.render(template.name, template.source(tools=tools), values)
        except TemplateFault:
            if not long:
                template.keep_apart()
            raise
        if seconds > SECONDS and not long:
            template.keep_apart()
        return text

    async def aclose(self) -> None:
        """End what renders long conversations. Safe twice."""
        await self._processes.aclose()


def load_template(model: ServedModel) -> ChatTemplate:
    """Read and compile the template of a model.

    Raises:
        InvalidArgument: the model has none, so it cannot chat.
        Unknown: its template is broken.
    """
    template = template_of_files(model.name, model.file)
    if template is not None:
        return template
    if model.card.tokenizer == "bytes" or model.card.model_input == "text":
        # An engine that takes text has its own template; here the prompt only estimates the load.
        return ChatTemplate(DEFAULT_TEMPLATE)
    raise InvalidArgument(
        f"Model '{model.name}' has no chat template. Use text completions, or set nvext.use_raw_prompt", field="model"
    )


def template_of_files(model: str, file: Callable[[str], bytes | None]) -> ChatTemplate | None:
    """Return the template in the files of a model: that of its own, else the one in the settings of the tokenizer.

    Raises:
        Unknown: it is broken, or a file cannot be read.
    """
    settings = _settings(model, file, _CONFIG_FILE)
    named = settings if "added_tokens_decoder" in settings else settings | _settings(model, file, _SPECIAL_TOKENS_FILE)
    special = {name: _token_text(named.get(name)) for name in _SPECIAL_TOKENS}
    tokens = {name: text for name, text in special.items() if text is not None}
    name = f"The chat template of model {model!r}"
    data, tool_source = file(_TEMPLATE_FILE), _text(file(_TOOL_TEMPLATE_FILE))
    if data is not None:
        return ChatTemplate(data.decode(errors="replace"), tokens, tool_source, name=f"{name} ({_TEMPLATE_FILE})")
    for place in (_CONFIG_FILE, _PROCESSOR_FILE):
        found = settings if place == _CONFIG_FILE else _settings(model, file, place)
        source, listed = _pick(found.get("chat_template"))
        if source is not None:
            return ChatTemplate(source, tokens, tool_source or listed, name=f"{name} ({place})")
    return None


async def describe_template(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the forms that the template in the files of a model reads, in words; nothing if there is none."""
    store = TemplateStore(_DESCRIBED)
    try:
        template = await asyncio.to_thread(template_of_files, "", files.get)
        if template is None:
            return {}
        await store.detect(template)
    except DynamoError as error:
        return {"template": str(error)}
    finally:
        await store.aclose()
    plain, with_tools = (dict(template.forms(tools=tools).describe()) for tools in (False, True))
    return plain | {f"{name}, with tools": value for name, value in with_tools.items() if value != plain.get(name)}


def _settings(model: str, file: Callable[[str], bytes | None], name: str) -> dict[str, Any]:
    data = file(name)
    if data is None:
        return {}
    try:
        return object_of(data)
    except Unreadable as error:
        raise Unknown(f"{name} of model {model!r} cannot be read: {error}", cause=error) from error


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode(errors="replace")


def _pick(value: Any) -> tuple[str | None, str | None]:
    """Return a template, or of a list of named ones the one called default; and the one for tools, if there is one."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value, tool_use = named.get("default", next(iter(named.values()), None)), named.get("tool_use")
        return value if isinstance(value, str) else None, tool_use if isinstance(tool_use, str) else None
    return value if isinstance(value, str) else None, None


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
