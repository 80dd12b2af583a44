"""Conversations as clients of the chat API send them.

`plain` is the same conversation for templates that lose or refuse the one that was sent, by what they cannot do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]

ASKED = "How is the weather in Zürich?\n  And „tomorrow“?"
NESTED = {"days": [{"n": 1, "at": None}, {"n": 2.5}], "where": {"city": "Zürich", "exact": True}, "quote": 'a "b" \n c'}
THOUGHTS = "The weather.\nI call it."
TOOLS: list[Message] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Where."}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "note",
            "description": "Writes it down.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
DOCUMENTS = [{"doc_id": 1, "title": "One", "text": "It rains."}, {"doc_id": 2, "title": "Zwei", "text": "Es schneit."}]

TEXT_BESIDE_CALLS = "text beside calls"


def system(content: Any, role: str = "system") -> Message:
    return {"role": role, "content": content}


def user(content: Any = ASKED) -> Message:
    return {"role": "user", "content": content}


def assistant(content: Any, *calls: Message, **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **fields}


def call(arguments: Any = None, id: str = "call00001", name: str = "weather") -> Message:
    text = json.dumps({"city": "Zürich"} if arguments is None else arguments, ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def result(content: Any = "mild", id: str = "call00001") -> Message:
    return {"role": "tool", "tool_call_id": id, "content": content}


def parts(*texts: str) -> list[Message]:
    return [{"type": "text", "text": text} for text in texts]


@dataclass(frozen=True)
class Conversation:
    """Messages, and what else of the request reaches the template."""

    messages: Sequence[Message]
    tools: Sequence[Message] | None = None
    variables: Message = field(default_factory=dict)
    goes_on: bool = False
    generates: bool = True
    plain: Mapping[str, Sequence[Message]] = field(default_factory=dict)


def with_tools(*messages: Message, **fields: Any) -> Conversation:
    return Conversation(messages, TOOLS, **fields)


def _two_calls() -> tuple[Message, Message]:
    return call(), call({"city": "Genf"}, "call00002")


CONVERSATIONS: dict[str, Conversation] = {
    "one question": Conversation([user()]),
    "no beginning of an answer": Conversation([user()], generates=False),
    "three turns": Conversation([user(), assistant("It is mild."), user("And now?")]),
    "white space around texts": Conversation([user("  Hi \n"), assistant("\n Hello "), user("\tSo?\n")]),
    "unicode": Conversation([user("日本語 🙂 \u0301 مرحبا")]),
    "markup in a text": Conversation([user("<|im_end|>[/INST]</s>{{ x }}{% y %}")]),
    "a system message": Conversation([system("Be short."), user()]),
    "two system messages": Conversation(
        [system("Be short."), system("Be kind."), user()],
        plain={"systems": [system("Be short.\n\nBe kind."), user()]},
    ),
    "a developer message": Conversation(
        [system("Be short.", "developer"), user()], plain={"developer": [system("Be short."), user()]}
    ),
    "a later system message": Conversation(
        [system("Be short."), user(), assistant("Mild."), system("Be kind."), user("And now?")],
        plain={
            "late system": [system("Be short."), user(), assistant("Mild."), user("Be kind."), user("And now?")],
            "late system, users": [
                system("Be short."),
                user(),
                assistant("Mild."),
                user("Be kind.\n\nAnd now?"),
            ],
            "late system, turns": [system("Be short.\n\nBe kind."), user(), assistant("Mild."), user("And now?")],
        },
    ),
    "a system message after a result": with_tools(
        user(),
        assistant(None, call()),
        result(),
        system("Be kind."),
        plain={
            "late system": [user(), assistant(None, call()), result(), user("Be kind.")],
            "late system, turns": [system("Be kind."), user(), assistant(None, call()), result()],
        },
    ),
    "two questions in a row": Conversation([user("One."), user("Two.")], plain={"users": [user("One.\n\nTwo.")]}),
    "a question of parts": Conversation([user(parts("What is", " this?"))]),
    "a question of one part": Conversation([user(parts(ASKED))]),
    "parts in all roles": Conversation(
        [system(parts("Be short.")), user(parts("Hi")), assistant(parts("Yes?")), user(parts("So?"))]
    ),
    "hints beside a part": Conversation([user([{"type": "text", "text": "Hi", "cache_control": {"type": "x"}}])]),
    "tools": with_tools(user()),
    "tools and a system message": with_tools(system("Be short."), user()),
    "a tool that has only a name": Conversation([user()], [{"type": "function", "function": {"name": "now"}}]),
    "tools and parts": with_tools(user(parts("How is", " it?"))),
    "a call": with_tools(user(), assistant(None, call()), result()),
    "a call with an empty text": with_tools(user(), assistant("", call()), result()),
    "a call with an empty list": with_tools(user(), assistant([], call()), result()),
    "a call without the key": with_tools(
        user(), {"role": "assistant", "tool_calls": [call()]}, result(), assistant("Mild."), user("Thanks.")
    ),
    "a call beside a text": with_tools(
        user(),
        assistant("I look.", call()),
        result(),
        plain={TEXT_BESIDE_CALLS: [user(), assistant("I look."), assistant(None, call()), result()]},
    ),
    "a call without arguments": with_tools(user(), assistant(None, call({}, name="note")), result()),
    "a call with nested arguments": with_tools(user(), assistant(None, call(NESTED)), result()),
    "a call with a long id": with_tools(
        user(), assistant(None, call(id="call_0123456789abcdef")), result(id="call_0123456789abcdef")
    ),
    "a call without tools": Conversation([user(), assistant(None, call()), result()]),
    "calls one after the other": with_tools(
        user(),
        assistant(None, call()),
        result(),
        assistant("", call({"city": "Genf"}, "call00002")),
        result("wet", "call00002"),
        assistant("Mild and wet."),
        user("Thanks."),
    ),
    "two calls at once": with_tools(
        user(),
        assistant(None, *_two_calls()),
        result(),
        result("wet", "call00002"),
        plain={
            "calls at once": [
                user(),
                assistant(None, call()),
                result(),
                assistant(None, call({"city": "Genf"}, "call00002")),
                result("wet", "call00002"),
            ]
        },
    ),
    "a result of parts": with_tools(user(), assistant(None, call()), result(parts("mild"))),
    "a result of several parts": with_tools(user(), assistant(None, call()), result(parts("mild", "and", "wet"))),
    "a result that is JSON": with_tools(user(), assistant(None, call()), result('{"t": "21 °C", "l": [1, null]}')),
    "an answer after a result": with_tools(user(), assistant(None, call()), result(), assistant("Mild."), user("Oh.")),
    "null in other keys": with_tools(
        user(), assistant("Yes?", refusal=None, audio=None, function_call=None, tool_calls=None), user("So.")
    ),
    "an empty list of calls": with_tools(user(), assistant("Yes?", tool_calls=[]), user("So.")),
    "reasoning_content before a call": with_tools(
        user(), assistant(None, call(), reasoning_content=THOUGHTS), result()
    ),
    "reasoning before a call": with_tools(user(), assistant("", call(), reasoning=THOUGHTS), result()),
    "reasoning in an earlier answer": Conversation(
        [user(), assistant("Mild.", reasoning_content=THOUGHTS), user("Thanks.")]
    ),
    "reasoning and a text before a call": with_tools(
        user(),
        assistant("I look.", call(), reasoning=THOUGHTS),
        result(),
        plain={
            TEXT_BESIDE_CALLS: [user(), assistant("I look."), assistant(None, call()), result()],
            "text beside reasoning": [
                user(),
                assistant(None, call(), reasoning_content=f"{THOUGHTS}\n\nI look."),
                result(),
            ],
        },
    ),
    "thinking switched off": Conversation([user()], variables={"enable_thinking": False, "thinking": False}),
    "thinking switched on": Conversation([user()], variables={"enable_thinking": True, "thinking": True}),
    "documents": Conversation([user()], variables={"documents": DOCUMENTS}),
    "documents and a system message": Conversation([system("Be short."), user()], variables={"documents": DOCUMENTS}),
    "an answer to go on with": Conversation([user(), assistant("It is")], goes_on=True),
    "an answer to go on with that ends in space": Conversation([user(), assistant("It is ")], goes_on=True),
    "an answer of parts to go on with": Conversation([user(), assistant(parts("It", " is"))], goes_on=True),
}
