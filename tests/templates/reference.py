"""What transformers is given for a conversation: the forms that the authors of each model document for its template.

Nothing here uses the code that detects forms, so that a mistake of it cannot hide in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

from tests.templates.conversations import Conversation, Message

FOLDER = Path(__file__).with_name("families")
BOS, EOS = "<s>", "</s>"

_TEXT = "text"
_PARTS = "parts"
_EITHER = "either"


def family(name: str) -> str:
    """Return the template of a family."""
    return (FOLDER / f"{name}.jinja").read_text()


@dataclass(frozen=True)
class Family:
    """What messages have to be for a template. `cannot` names what it loses or refuses."""

    name: str
    cannot: frozenset[str] = frozenset()
    #: The form of the content of each role; text for those that are not here.
    contents: Mapping[str, str] = field(default_factory=dict)
    text_arguments: bool = False
    no_content: str | None = ""
    short_ids: bool = False
    reasoning_part: bool = False
    #: The variables that switch thinking off, where the template has others than clients send.
    switched_off: Mapping[str, Any] = field(default_factory=dict)

    @property
    def template(self) -> str:
        """The source."""
        return family(self.name)

    def messages(self, conversation: Conversation) -> list[Message]:
        """Return the messages of a conversation in the forms of the family."""
        plain = [messages for what, messages in conversation.plain.items() if what in self.cannot]
        return [self._message(message) for message in (plain[0] if plain else conversation.messages)]

    def tools(self, conversation: Conversation) -> list[Message] | None:
        """Return the tools of a conversation, with all that the template cannot do without."""
        if conversation.tools is None or "bare tools" not in self.cannot:
            return None if conversation.tools is None else list(conversation.tools)
        least = {"description": "", "parameters": {"type": "object", "properties": {}}}
        return [{**tool, "function": {**least, **tool["function"]}} for tool in conversation.tools]

    def _message(self, message: Message) -> Message:
        made = dict(message)
        calls = made.pop("tool_calls", None)
        if calls:
            made["tool_calls"] = [self._call(call) for call in calls]
        if calls and not made.get("content"):
            made["content"] = self.no_content
        else:
            made["content"] = self._content(message)
        if self.short_ids and "tool_call_id" in made:
            made["tool_call_id"] = _short(made["tool_call_id"])
        thoughts = made.get("reasoning_content") or made.get("reasoning")
        if thoughts and self.reasoning_part:
            said = [{"type": "text", "text": made["content"]}] if made["content"] else []
            made["content"] = [{"type": "thinking", "thinking": thoughts}, *said]
        return made

    def _content(self, message: Message) -> Any:
        content, form = message["content"], self.contents.get(message["role"], _TEXT)
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if form == _PARTS else content
        if form == _TEXT:
            return "\n".join(part["text"] for part in content)
        return [{"type": "text", "text": part["text"]} for part in content]

    def _call(self, call: Message) -> Message:
        function = dict(call["function"])
        if not self.text_arguments:
            function["arguments"] = json.loads(function["arguments"])
        return {**call, "id": _short(call["id"]) if self.short_ids else call["id"], "function": function}


def _short(given: str) -> str:
    return given if len(given) == 9 and given.isalnum() else hashlib.sha256(given.encode()).hexdigest()[:9]


def _either(*roles: str) -> dict[str, str]:
    return dict.fromkeys(roles, _EITHER)


_NO_DEVELOPER = frozenset({"developer"})
_TURNS = frozenset({"developer", "systems", "users"})
_LATE = _TURNS | {"late system, turns"}
_DEEPSEEK: Mapping[str, Any] = {"text_arguments": True, "no_content": None}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("command_r", _NO_DEVELOPER | {"bare tools"}),
        Family("deepseek_r1", frozenset({"developer", "systems", "text beside calls"}), **_DEEPSEEK),
        Family("deepseek_v3", _NO_DEVELOPER, **_DEEPSEEK),
        Family("deepseek_v31", _NO_DEVELOPER | {"bare tools"}, **_DEEPSEEK),
        Family("functiongemma", contents=_either("system", "developer", "user", "assistant", "tool")),
        Family("gemma3", _TURNS | {"late system, users"}, _either("user", "assistant")),
        Family("glm45", _NO_DEVELOPER, _either("system", "user", "assistant")),
        Family(
            "gpt_oss",
            frozenset({"systems", "calls at once", "text beside reasoning", "late system", "bare tools"}),
            switched_off={"reasoning_effort": "low"},
        ),
        Family("granite33"),
        Family("hermes", _NO_DEVELOPER | {"bare tools"}),
        Family("kimi_k2", contents=_either("system", "developer", "user", "assistant", "tool")),
        Family("llama31", frozenset({"calls at once"})),
        Family("llama32_vision", frozenset({"calls at once"}), _either("developer", "user", "assistant")),
        Family("llama4", contents=_either("developer", "user", "assistant")),
        Family(
            "minimax_m2",
            frozenset({"developer", "systems", "late system"}),
            _either("system", "user", "assistant", "tool"),
        ),
        Family("mistral_v13", _LATE, _either("system", "user", "assistant"), reasoning_part=True),
        Family("mistral_v3", _LATE, short_ids=True),
        Family("mistral_v7", _NO_DEVELOPER, _either("user")),
        Family("nemotron", frozenset({"developer", "systems", "late system"})),
        Family("olmo3", _NO_DEVELOPER),
        Family("phi4_mini"),
        Family("qwen25", _NO_DEVELOPER),
        Family("qwen2_vl", contents=_either("system", "developer", "user", "assistant", "tool")),
        Family("qwen3", _NO_DEVELOPER),
        Family("qwen3_coder"),
        Family("seed_oss", switched_off={"thinking_budget": 0}),
        Family(
            "smolvlm",
            contents=dict.fromkeys(("system", "developer", "user", "assistant", "tool"), _PARTS),
        ),
    )
}

#: Renders messages; None where the template refuses them.
Library: TypeAlias = Callable[[Family, Conversation], str | None]


def library() -> Library:
    """Return what renders by the transformers library."""
    import jinja2
    from tokenizers import Tokenizer, models

    render_jinja_template = import_module("transformers.utils.chat_template_utils").render_jinja_template
    tokenizer = import_module("transformers").PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({BOS: 0, EOS: 1}, unk_token=EOS)), bos_token=BOS, eos_token=EOS
    )

    def render(family: Family, conversation: Conversation) -> str | None:
        messages = family.messages(conversation)
        tools = family.tools(conversation)
        options: dict[str, Any] = {
            "chat_template": family.template,
            "add_generation_prompt": conversation.generates and not conversation.goes_on,
            "continue_final_message": conversation.goes_on,
            **conversation.variables,
            **(family.switched_off if conversation.variables.get("thinking") is False else {}),
        }
        try:
            if family.no_content is None:
                # `apply_chat_template` leaves out keys that hold null, which it did not when such templates were made.
                kept = [{key: value for key, value in each.items() if value or key == "content"} for each in messages]
                texts, _ = render_jinja_template([kept], tools=tools, **tokenizer.special_tokens_map, **options)
                return str(texts[0])
            return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options))
        except (jinja2.TemplateError, TypeError, ValueError):
            return None

    return render


def digest(prompt: str | None) -> str:
    """Return what is recorded of a prompt."""
    return "refused" if prompt is None else hashlib.sha256(prompt.encode()).hexdigest()[:16]
