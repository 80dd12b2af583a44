"""Detection of the message forms that a chat template reads: render small conversations and inspect the prompts.

A form fits if the template shows all that a conversation holds. Sources of templates do not tell: macros, loops and
namespaces stand between a message and what is written of it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from jinja2 import nodes

from dynamo_generation.templates.forms import (
    ASSISTANT,
    DEVELOPER,
    SYSTEM,
    TOOL,
    USER,
    ContentForm,
    TemplateForms,
)
from dynamo_generation.templates.messages import REASONING_NAMES, Message, template_messages, template_tools

#: Yields messages and tools, and is sent the prompt; None where the template refuses them.
Detection: TypeAlias = Generator[tuple[list[Message], Sequence[Message] | None], str | None, TemplateForms]

#: Words that no template has. A content has two lines, because a template that shows a list or an object as it is
#: writes no newline.
_HELLO, _ANSWER, _THOUGHT = "Zqhello", "Zqanswer", "Zqthought"
_TEXT, _FIRST, _LAST = "Zqa\nZqb", "Zqc\nZqd", "Zqe\nZqf"
_KEYS = ("zqkey", "zqother")
_VALUE = "Zqvalue"
#: An object that is shown as Python shows it, or a text that is shown as a JSON string.
_BAD = tuple(bad for key in _KEYS for bad in (f"'{key}'", f'\\"{key}\\"'))
_IDS = ("a1b2c3d4e", "f5g6h7i8j")
_LONG_ID = "call_0123456789abcdef01234567"

_TOOLS: Sequence[Message] = (
    {
        "type": "function",
        "function": {
            "name": "zqtool",
            "description": "A tool.",
            "parameters": {"type": "object", "properties": {"zq": {"type": "string", "description": "Any."}}},
        },
    },
)


@dataclass(frozen=True, slots=True)
class _Conversation:
    """Messages, and the words that their prompt must have."""

    messages: Sequence[Message]
    words: Sequence[str]
    tools: Sequence[Message] = _TOOLS

    def is_shown(self, prompt: str | None) -> bool:
        return (
            prompt is not None and all(word in prompt for word in self.words) and not any(bad in prompt for bad in _BAD)
        )


_Candidates: TypeAlias = Callable[[TemplateForms], Iterator[TemplateForms]]


def detect_forms(forms: TemplateForms, *, tools: bool) -> Detection:
    """Find the forms of a template in conversations with or without tools; `forms` are those that its source tells."""
    for candidates, conversations in [*_PROBES, *(_PROBES_WITH_TOOLS if tools else ())]:
        forms = yield from _first_shown(candidates(forms), conversations, forms, tools=tools)
    return forms


def run_detection(
    detection: Detection, render: Callable[[list[Message], Sequence[Message] | None], str | None]
) -> TemplateForms:
    """Return the forms that a detection finds; `render` returns None for messages that the template refuses."""
    try:
        shown = next(detection)
        while True:
            shown = detection.send(render(*shown))
    except StopIteration as end:
        found: TemplateForms = end.value
        return found


def _first_shown(
    candidates: Iterator[TemplateForms],
    conversations: Sequence[_Conversation],
    forms: TemplateForms,
    *,
    tools: bool,
) -> Detection:
    """Return the first candidate with which all conversations are shown; else the forms as they are."""
    for candidate in candidates:
        for conversation in conversations:
            shown = template_tools(conversation.tools, candidate) if tools else None
            prompt = yield template_messages(conversation.messages, candidate), shown
            if not conversation.is_shown(prompt):
                break
        else:
            return candidate
    return forms


def reasoning_names(template: nodes.Template) -> tuple[str, ...]:
    """Return the keys of a message under which a template may read reasoning."""
    read = {node.attr for node in template.find_all(nodes.Getattr)}
    read |= {node.value for node in template.find_all(nodes.Const) if isinstance(node.value, str)}
    return tuple(name for name in REASONING_NAMES if name in read)


def _content_forms(role: str) -> _Candidates:
    def candidates(forms: TemplateForms) -> Iterator[TemplateForms]:
        for form in (ContentForm.TEXT_OR_PARTS, ContentForm.TEXT, ContentForm.PARTS, ContentForm.ONE_PART):
            yield replace(forms, contents={**forms.contents, role: form})

    return candidates


def _call_forms(forms: TemplateForms) -> Iterator[TemplateForms]:
    for result in (ContentForm.TEXT, ContentForm.ONE_PART):
        for no_content in (forms.no_content, "" if forms.no_content is None else None):
            for text_arguments in (False, True):
                contents = {**forms.contents, TOOL: result}
                yield replace(forms, contents=contents, no_content=no_content, text_arguments=text_arguments)


def _developer_forms(forms: TemplateForms) -> Iterator[TemplateForms]:
    yield from _content_forms(DEVELOPER)(forms)
    yield replace(forms, developer_as_system=True)


def _tool_forms(forms: TemplateForms) -> Iterator[TemplateForms]:
    """Return the forms of results where none was found beside a call without a text."""
    return iter(()) if TOOL in forms.contents else _content_forms(TOOL)(forms)


def _reasoning_forms(forms: TemplateForms) -> Iterator[TemplateForms]:
    if forms.reasoning:
        yield forms
        yield replace(forms, reasoning=(), reasoning_part=True)


def _text_beside_reasoning(forms: TemplateForms) -> Iterator[TemplateForms]:
    return _either("text_as_reasoning")(forms) if forms.reasoning else iter(())


def _system_after_result(forms: TemplateForms) -> Iterator[TemplateForms]:
    yield forms
    yield replace(forms, late_system_as_user=False, late_system_first=True)


def _either(*changes: str) -> _Candidates:
    """Return the forms as they are, then those with each of some changes."""

    def candidates(forms: TemplateForms) -> Iterator[TemplateForms]:
        yield forms
        yield from (replace(forms, **{change: True}) for change in changes)  # type: ignore[arg-type]

    return candidates


def _message(role: str, content: Any, **fields: Any) -> Message:
    return {"role": role, "content": content, **fields}


def _parts(*texts: str) -> list[Message]:
    return [{"type": "text", "text": text} for text in texts]


def _call(key: str, id: str) -> Message:
    return {"id": id, "type": "function", "function": {"name": "zqtool", "arguments": {key: _VALUE}}}


def _calling(content: str | None, *calls: Message, result: Any = _ANSWER) -> list[Message]:
    return [
        _message(USER, _HELLO),
        _message(ASSISTANT, content, tool_calls=list(calls)),
        *(_message(TOOL, result, tool_call_id=call["id"]) for call in calls),
    ]


def _thinking(messages: Sequence[Message]) -> list[Message]:
    return [{**each, REASONING_NAMES[0]: _THOUGHT} if each["role"] == ASSISTANT else each for each in messages]


def _both_contents(make: Callable[[Any], list[Message]]) -> list[_Conversation]:
    """Return a conversation with a text, and one with two parts."""
    return [
        _Conversation(make(_TEXT), [_TEXT]),
        _Conversation(make(_parts(_FIRST, _LAST)), [_FIRST, _LAST]),
    ]


_ONE_CALL = _call(_KEYS[0], _IDS[0])
_CALL_AND_TEXT = _calling("Zqtext", _ONE_CALL)
_TWO = ["Zqone", "Zqtwo"]

_PROBES: Sequence[tuple[_Candidates, Sequence[_Conversation]]] = (
    (_content_forms(USER), _both_contents(lambda content: [_message(USER, content)])),
    (_call_forms, [_Conversation(_calling(None, _ONE_CALL), [_KEYS[0], _VALUE])]),
    (_content_forms(TOOL), _both_contents(lambda content: _calling(None, _ONE_CALL, result=content))),
    (_tool_forms, _both_contents(lambda content: _calling("Zqtext", _ONE_CALL, result=content))),
    (
        _content_forms(ASSISTANT),
        _both_contents(lambda content: [_message(USER, _HELLO), _message(ASSISTANT, content), _message(USER, _HELLO)]),
    ),
    (_content_forms(SYSTEM), _both_contents(lambda content: [_message(SYSTEM, content), _message(USER, _HELLO)])),
    (
        _developer_forms,
        _both_contents(lambda content: [_message(DEVELOPER, content), _message(USER, _HELLO)]),
    ),
    (
        _either("one_system"),
        [
            _Conversation([_message(SYSTEM, _TWO[0]), _message(role, _TWO[1]), _message(USER, _HELLO)], _TWO)
            for role in (SYSTEM, DEVELOPER)
        ],
    ),
    (_either("one_user"), [_Conversation([_message(USER, word) for word in _TWO], _TWO)]),
    (
        _either("late_system_as_user", "late_system_first"),
        [
            _Conversation(messages, [_TWO[0]])
            for messages in (
                [_message(USER, _HELLO), _message(SYSTEM, _TWO[0])],
                [_message(USER, _HELLO), _message(DEVELOPER, _TWO[0])],
                [
                    _message(USER, _HELLO),
                    _message(ASSISTANT, _ANSWER),
                    _message(SYSTEM, _TWO[0]),
                    _message(USER, _HELLO),
                ],
            )
        ],
    ),
    # Some show no system message while a result is the last message, but refuse one that is not the first.
    *(
        (_system_after_result, [_Conversation([*_calling(None, _ONE_CALL), _message(SYSTEM, _TWO[0])], words)])
        for words in ([_TWO[0]], [_KEYS[0]])
    ),
    (_either("short_ids"), [_Conversation(_calling(None, _call(_KEYS[0], _LONG_ID)), [_KEYS[0]])]),
    (_either("calls_apart"), [_Conversation(_CALL_AND_TEXT, [_KEYS[0]])]),
    (_either("one_call"), [_Conversation(_calling(None, *map(_call, _KEYS, _IDS)), _KEYS)]),
    (_reasoning_forms, [_Conversation(_thinking(_calling(None, _ONE_CALL)), [_KEYS[0], _THOUGHT])]),
    (_text_beside_reasoning, [_Conversation(_thinking(_CALL_AND_TEXT), [_KEYS[0]])]),
)
_PROBES_WITH_TOOLS: Sequence[tuple[_Candidates, Sequence[_Conversation]]] = (
    (
        _either("whole_tools"),
        [_Conversation([_message(USER, _HELLO)], [_HELLO], [{"type": "function", "function": {"name": "zqtool"}}])],
    ),
)
