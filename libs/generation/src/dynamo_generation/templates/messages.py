"""Client messages in the forms that a chat template reads."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, TypeAlias

from dynamo_core.protocol import Unreadable

from dynamo_generation.bodies.decode import object_of
from dynamo_generation.requests.tools import FUNCTION
from dynamo_generation.templates.forms import (
    ASSISTANT,
    DEVELOPER,
    SYSTEM,
    TOOL,
    USER,
    ContentForm,
    TemplateForms,
)

Message: TypeAlias = dict[str, Any]

#: The keys under which clients send reasoning; the first that has a text counts.
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
#: Characters of an id of a call, where a template refuses any other number of them.
SHORT_ID = 9
_SYSTEMS = frozenset({SYSTEM, DEVELOPER})
#: Stands between texts that become one.
_APART = "\n\n"


def template_messages(raw: Sequence[Mapping[str, Any]], forms: TemplateForms) -> list[Message]:
    """Return messages as one template reads them.

    Keys that hold null are left out, because a template may take a key that is there for one that holds something.
    """
    messages = [_without_nothing(message) for message in raw]
    if forms.rearranges:
        for applies, rearranged in _REARRANGEMENTS:
            if applies(forms):
                messages = list(rearranged(messages))
    return [_shaped(message, forms) for message in messages]


def template_tools(tools: Sequence[Message] | None, forms: TemplateForms) -> Sequence[Message] | None:
    """Return tools as one template reads them."""
    return [_whole(tool) for tool in tools] if tools is not None and forms.whole_tools else tools


def _whole(tool: Message) -> Message:
    function = tool.get(FUNCTION)
    if not isinstance(function, dict):
        return tool
    given = {key: value for key, value in function.items() if value is not None}
    return {**tool, FUNCTION: {"description": "", "parameters": {"type": "object", "properties": {}}, **given}}


def raw_prompt(raw: Sequence[Mapping[str, Any]]) -> str:
    """Return the bare texts of messages line by line: the prompt where no template is used."""
    return "\n".join(
        _text_of(message.get("content")) for message in raw if message.get("content") or not message.get("tool_calls")
    )


def _text_of(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Return a content as one text, its parts line by line."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "\n".join(part["text"] for part in content if part["type"] == "text")


def _without_nothing(message: Mapping[str, Any]) -> Message:
    kept = {key: value for key, value in message.items() if value is not None}
    if not kept.get("tool_calls", True):
        del kept["tool_calls"]
    return kept


def _shaped(message: Message, forms: TemplateForms) -> Message:
    role, calls = message["role"], message.get("tool_calls")
    content = message.get("content") or ""
    if calls and not content:
        message["content"] = forms.no_content
    else:
        message["content"] = _content(content, forms.contents.get(role, ContentForm.TEXT))
    if calls:
        message["tool_calls"] = [_call(call, forms) for call in calls]
    if role == ASSISTANT and (thoughts := _reasoning(message)):
        message |= {name: thoughts for name in forms.reasoning if name not in message}
        if forms.reasoning_part:
            parts = _parts(message["content"] or [])
            message["content"] = [{"type": "thinking", "thinking": thoughts}, *parts]
    elif role == TOOL and forms.short_ids and isinstance(given := message.get("tool_call_id"), str):
        message["tool_call_id"] = _short(given)
    return message


def _content(content: str | list[dict[str, Any]], form: ContentForm) -> str | list[dict[str, Any]]:
    given = form is ContentForm.TEXT_OR_PARTS
    if form is ContentForm.TEXT or (given and isinstance(content, str)):
        return _text_of(content)
    if form is ContentForm.ONE_PART or not content:
        return [_part(_text_of(content))]
    return _parts(content)


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [_part(content)]
    # Without what else a client may put beside the text, such as hints for caches.
    return [_part(part["text"]) for part in content if part["type"] == "text"]


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _call(call: Mapping[str, Any], forms: TemplateForms) -> Message:
    shaped = {"type": FUNCTION, **{key: value for key, value in call.items() if value is not None}}
    if forms.short_ids and "id" in shaped:
        shaped["id"] = _short(shaped["id"])
    if FUNCTION in shaped:
        function = shaped[FUNCTION]
        shape = _argument_text if forms.text_arguments else _argument_object
        shaped[FUNCTION] = {**function, "arguments": shape(function.get("arguments") or "{}")}
    return shaped


def _argument_text(arguments: str | dict[str, Any]) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _argument_object(arguments: str | dict[str, Any]) -> str | dict[str, Any]:
    """Return the object that a text holds; the text if it holds none."""
    if isinstance(arguments, str):
        with suppress(Unreadable):
            return object_of(arguments)
    return arguments


def _reasoning(message: Mapping[str, Any]) -> str | None:
    given = (message.get(name) for name in REASONING_NAMES)
    return next((text for text in given if text and isinstance(text, str)), None)


def _short(given: str) -> str:
    """Return an id of nine characters for an id, always the same one."""
    if len(given) == SHORT_ID and given.isalnum():
        return given
    return hashlib.sha256(given.encode(errors="replace")).hexdigest()[:SHORT_ID]


def _as_system(messages: Iterable[Message]) -> Iterable[Message]:
    return [{**each, "role": SYSTEM} if each["role"] == DEVELOPER else each for each in messages]


def _one_system(messages: list[Message]) -> Iterable[Message]:
    leading, rest = _at_first_turn(messages)
    return [*_joined(leading), *rest]


def _late_as_user(messages: list[Message]) -> Iterable[Message]:
    leading, rest = _at_first_turn(messages)
    return [*leading, *({**each, "role": USER} if each["role"] in _SYSTEMS else each for each in rest)]


def _late_first(messages: list[Message]) -> Iterable[Message]:
    leading, rest = _at_first_turn(messages)
    late = [each for each in rest if each["role"] in _SYSTEMS]
    return [*_joined([*leading, *late]), *(each for each in rest if each["role"] not in _SYSTEMS)] if late else messages


def _at_first_turn(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """Return the system messages at the beginning, and the messages after them."""
    count = next((at for at, each in enumerate(messages) if each["role"] not in _SYSTEMS), len(messages))
    return messages[:count], messages[count:]


def _one_user(messages: list[Message]) -> Iterable[Message]:
    for role, group in groupby(messages, key=lambda message: message["role"]):
        same = list(group)
        yield from _joined(same) if role == USER else same


def _joined(messages: list[Message]) -> list[Message]:
    """Return the messages as one, if there are several."""
    if len(messages) < 2:
        return messages
    contents = [each.get("content") or "" for each in messages]
    if all(isinstance(content, str) for content in contents):
        return [{**messages[0], "content": _APART.join(contents)}]
    return [{**messages[0], "content": [part for content in contents for part in _parts(content)]}]


def _calls_apart(messages: list[Message]) -> Iterable[Message]:
    for message in messages:
        if "tool_calls" in message and message.get("content"):
            calls = message.pop("tool_calls")
            yield message
            yield {"role": ASSISTANT, "tool_calls": calls}
        else:
            yield message


def _text_as_reasoning(messages: list[Message]) -> Iterable[Message]:
    for message in messages:
        thoughts = _reasoning(message)
        if thoughts is not None and "tool_calls" in message and message.get("content"):
            rest = {key: value for key, value in message.items() if key not in REASONING_NAMES}
            text = _text_of(rest.pop("content"))
            yield {**rest, REASONING_NAMES[0]: f"{thoughts}{_APART}{text}"}
        else:
            yield message


def _one_call(messages: list[Message]) -> Iterable[Message]:
    """Yield each call of a message that has several in a message of its own, and its results after it."""
    results: dict[str, list[Message]] = defaultdict(list)
    waiting: list[Message] = []
    for message in [*messages, {"role": ""}]:
        if waiting and message["role"] == TOOL:
            given = message.get("tool_call_id")
            results[given if isinstance(given, str) else ""].append(message)
            continue
        for call in waiting:
            yield call
            yield from results.pop(call["tool_calls"][0].get("id") or "", ())
        yield from (each for group in results.values() for each in group)
        results.clear()
        calls = message.get("tool_calls", ())
        if len(calls) > 1:
            rest = {"role": ASSISTANT}
            waiting = [{**(rest if at else message), "tool_calls": [call]} for at, call in enumerate(calls)]
        else:
            waiting = []
            if message["role"]:
                yield message


_REARRANGEMENTS: Sequence[tuple[Callable[[TemplateForms], bool], Callable[[list[Message]], Iterable[Message]]]] = (
    (lambda forms: forms.developer_as_system, _as_system),
    (lambda forms: forms.one_system, _one_system),
    (lambda forms: forms.late_system_as_user, _late_as_user),
    (lambda forms: forms.late_system_first, _late_first),
    (lambda forms: forms.one_user, _one_user),
    (lambda forms: forms.text_as_reasoning, _text_as_reasoning),
    (lambda forms: forms.calls_apart, _calls_apart),
    (lambda forms: forms.one_call, _one_call),
)
