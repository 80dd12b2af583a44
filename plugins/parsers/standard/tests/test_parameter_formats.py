"""Calls that are no JSON: their arguments come as JSON, typed by the schema of the tool."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from dynamo_core import ContentDelta, ParserDelta, ToolCallArguments, ToolCallParser, ToolCallStart
from dynamo_plugin_parsers_standard.parameter_formats import (
    DeepSeekV32Parser,
    FunctionGemmaParser,
    Gemma4Parser,
    Glm45Parser,
    Glm47Parser,
    Llama4PythonicParser,
    MiniMaxM2Parser,
    Olmo3Parser,
    Qwen3CoderParser,
    SeedOssParser,
    ToolCodeParser,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# How models write calls, apart from the parsers.

#: Name and arguments.
Call = tuple[str, Mapping[str, Any]]
Write = Callable[[Sequence[Call]], str]


@dataclass(frozen=True)
class Format:
    """A parser, and what writes calls for it."""

    parser: type[ToolCallParser]
    write: Write
    #: Texts that disturb: the markup of the format.
    tags: tuple[str, ...]
    #: Whether a string may have any text in it but the tags.
    streams: bool = True


def raw(value: Any) -> str:
    """Return a value between tags: strings as they are, others as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def qwen(section: str) -> Write:
    def write(calls: Sequence[Call]) -> str:
        texts = []
        for name, arguments in calls:
            body = "".join(f"<parameter={key}>\n{raw(value)}\n</parameter>\n" for key, value in arguments.items())
            texts.append(f"<{section}>\n<function={name}>\n{body}</function>\n</{section}>")
        return "\n".join(texts)

    return write


def glm(newline: str) -> Write:
    def write(calls: Sequence[Call]) -> str:
        texts = []
        for name, arguments in calls:
            body = "".join(
                f"<arg_key>{key}</arg_key>{newline}<arg_value>{raw(value)}</arg_value>{newline}"
                for key, value in arguments.items()
            )
            texts.append(f"<tool_call>{name}{newline}{body}</tool_call>")
        return newline.join(texts)

    return write


def minimax(calls: Sequence[Call]) -> str:
    texts = []
    for name, arguments in calls:
        body = "".join(f'<parameter name="{key}">{raw(value)}</parameter>\n' for key, value in arguments.items())
        texts.append(f'<invoke name="{name}">\n{body}</invoke>\n')
    return f"<minimax:tool_call>\n{''.join(texts)}</minimax:tool_call>"


def dsml(calls: Sequence[Call]) -> str:
    texts = []
    for name, arguments in calls:
        body = "".join(
            f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{raw(value)}'
            "</｜DSML｜parameter>\n"
            for key, value in arguments.items()
        )
        texts.append(f'<｜DSML｜invoke name="{name}">\n{body}</｜DSML｜invoke>\n')
    return f"<｜DSML｜function_calls>\n{''.join(texts)}</｜DSML｜function_calls>"


def python(before: str, between: str, after: str) -> Write:
    def write(calls: Sequence[Call]) -> str:
        texts = [
            f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls
        ]
        return f"{before}{between.join(texts)}{after}"

    return write


def braces(before: str, quote: str, after: str) -> Write:
    def value(found: Any) -> str:
        if isinstance(found, str):
            return f"{quote}{found}{quote}"
        if isinstance(found, dict):
            return f"{{{','.join(f'{key}:{value(each)}' for key, each in found.items())}}}"
        if isinstance(found, list):
            return f"[{','.join(map(value, found))}]"
        return json.dumps(found)

    def write(calls: Sequence[Call]) -> str:
        return "".join(f"{before}call:{name}{value(dict(arguments))}{after}" for name, arguments in calls)

    return write


_XML = ("<function=f>", "</function>", "<parameter=s>", "</parameter>", "<parameter=")
_GLM = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_INVOKE = ('<invoke name="f">', "</invoke>", '<parameter name="s">', "</parameter>")
_DSML = ('<｜DSML｜invoke name="f">', "</｜DSML｜invoke>", '<｜DSML｜parameter name="s" string="true">')
_PYTHON = ("<|python_start|>", "<|python_end|>", "[f(a=1)]", "f(a='b')", "'", '"', "(", "]", "#", "\\")
_LINES = ("<function_calls>", "</function_calls>", "f(a='b')", "'", '"', "(", "]", "#", "\\")

FORMATS = [
    Format(Qwen3CoderParser, qwen("tool_call"), ("<tool_call>", "</tool_call>", *_XML)),
    Format(SeedOssParser, qwen("seed:tool_call"), ("<seed:tool_call>", "</seed:tool_call>", *_XML)),
    Format(Glm45Parser, glm("\n"), _GLM),
    Format(Glm47Parser, glm(""), _GLM),
    Format(MiniMaxM2Parser, minimax, ("<minimax:tool_call>", "</minimax:tool_call>", *_INVOKE)),
    Format(
        DeepSeekV32Parser,
        dsml,
        ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "</｜DSML｜parameter>", *_DSML),
    ),
    Format(Llama4PythonicParser, python("<|python_start|>[", ", ", "]<|python_end|>"), _PYTHON, streams=False),
    Format(Olmo3Parser, python("<function_calls>\n", "\n", "\n</function_calls>"), _LINES, streams=False),
    Format(ToolCodeParser, python("```tool_code\n", "\n", "\n```"), ("```", *_LINES), streams=False),
    Format(
        FunctionGemmaParser,
        braces("<start_function_call>", "<escape>", "<end_function_call>"),
        ("<start_function_call>", "call:f{", "<escape>", "<end_function_call>", "{", "}", "[", "]", ",", ":"),
    ),
    Format(
        Gemma4Parser,
        braces("<|tool_call>", '<|"|>', "<tool_call|>"),
        ("<|tool_call>", "call:f{", '<|"|>', "<tool_call|>", "{", "}", "[", "]", ",", ":"),
    ),
]


SCHEMA = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "t": {"type": "string"},
        "n": {"type": "integer"},
        "x": {"type": "number"},
        "b": {"type": "boolean"},
        "o": {"$ref": "#/$defs/Thing"},
        "l": {"type": "array", "items": {"type": "string"}},
        "m": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "$defs": {"Thing": {"type": "object"}},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")]
ALL = [pytest.param(each, id=str(each.parser.NAME)) for each in FORMATS]
#: The formats that tell strings as they come.
STREAMS = [pytest.param(each, id=str(each.parser.NAME)) for each in FORMATS if each.streams]

CALL = ("call", "f", '{"s": "a", "n": 5}')
Q, END = "<tool_call>\n<function=f>\n", "</function>\n</tool_call>"


def p(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def content(text: str) -> tuple[str, str]:
    return ("content", text)


def f(**arguments: Any) -> tuple[str, str, str]:
    return ("call", "f", json.dumps(arguments, ensure_ascii=False))


#: What is sound, or forgiven: the text, and what becomes of it.
FOUND: list[tuple[type[ToolCallParser], str, list[tuple[str, ...]]]] = [
    (Qwen3CoderParser, f"{Q}{p('s', 'a')}{p('n', '5')}{END}", [CALL]),
    (Qwen3CoderParser, f"So.\n{Q}{p('s', 'a')}{END}\n\nAnd so.", [content("So.\n"), f(s="a"), content("\n\nAnd so.")]),
    (Qwen3CoderParser, f"{Q}{p('b', 'True')}{p('m', 'null')}{END}", [f(b=True, m=None)]),
    (Qwen3CoderParser, f"{Q}{p('s', '5')}{p('unknown', '5')}{END}", [f(s="5", unknown="5")]),
    (Qwen3CoderParser, f"{Q}<parameter=s>a</parameter><parameter=n>5</parameter>{END}", [CALL]),
    # One newline at either end belongs to the tags.
    (Qwen3CoderParser, f"{Q}<parameter=s>\n\n  a\n\n</parameter>{END}", [f(s="\n  a\n")]),
    (Qwen3CoderParser, f"{Q}<parameter=s>\n</parameter>{END}", [f(s="")]),
    (Qwen3CoderParser, f"{Q}<parameter=s></parameter>{END}", [f(s="")]),
    # Tags that may be missing.
    (Qwen3CoderParser, f"<function=f>\n{p('s', 'a')}{END}", [f(s="a")]),
    (Qwen3CoderParser, f"<function=f>\n{p('s', 'a')}</function> So", [f(s="a"), content(" So")]),
    (Qwen3CoderParser, f"{Q}{p('s', 'a')}</tool_call>", [f(s="a")]),
    (Qwen3CoderParser, f"{Q}{p('s', 'a')}<function=g>\n{END}", [f(s="a"), ("call", "g", "{}")]),
    (Qwen3CoderParser, f"{Q}<parameter=s>\na\n<parameter=n>\n5\n{END}", [CALL]),
    (Qwen3CoderParser, f"{Q}<parameter=s>\na\n<parameter=n>\n5\n</function>", [CALL]),
    (Qwen3CoderParser, f"{Q}{END}\n{Q}{p('s', 'a')}{END}", [("call", "f", "{}"), f(s="a")]),
    # Tags in a value that are not its end.
    (Qwen3CoderParser, f"{Q}{p('s', '<a>1</parameter></a>')}{END}", [f(s="<a>1</parameter></a>")]),
    (Qwen3CoderParser, f"{Q}{p('s', 'x</function>y')}{END}", [f(s="x</function>y")]),
    (Qwen3CoderParser, f"{Q}{p('s', '<parameter=none>')}{END}", [f(s="<parameter=none>")]),
    (Qwen3CoderParser, f"{Q}{p('s', '<tool_call> <function=g>')}{END}", [f(s="<tool_call> <function=g>")]),
    (Qwen3CoderParser, f"{Q}{p('s', '</parameter>')}{p('n', '5')}{END}", [f(s="</parameter>", n=5)]),
    (Qwen3CoderParser, f"{Q}{p('s', '</parameter> <parameter=')}{END}", [f(s="</parameter> <parameter=")]),
    # The last one of the same name counts.
    (Qwen3CoderParser, f"{Q}{p('s', 'a')}{p('s', 'b')}{END}", [("call", "f", '{"s": "a", "s": "b"}')]),
    (Glm45Parser, "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a</arg_value>\n</tool_call>", [f(s="a")]),
    (Glm45Parser, "<tool_call>f<arg_key>s</arg_key><arg_value>\na\n</arg_value></tool_call>", [f(s="\na\n")]),
    (Glm45Parser, "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>5</tool_call>\n<tool_call>g", [f(n=5), content("")]),
    (Glm47Parser, "<tool_call>f</tool_call><tool_call>g</tool_call>", [("call", "f", "{}"), ("call", "g", "{}")]),
    (
        Glm47Parser,
        "<tool_call>f<arg_key>s</arg_key><arg_value>1</arg_value>2</arg_value></tool_call>",
        [f(s="1</arg_value>2")],
    ),
    (
        MiniMaxM2Parser,
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">a\n</parameter>\n</invoke>\n</minimax:tool_call>',
        [f(s="a\n")],
    ),
    (
        DeepSeekV32Parser,
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="m" string="true">null'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="true">5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="u" string="false">[1]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="v">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        [f(m="null", n=5, u=[1], v="x")],
    ),
    (
        Llama4PythonicParser,
        "So <|python_start|>[f(a=1), g()]<|python_end|>",
        [content("So "), f(a=1), ("call", "g", "{}")],
    ),
    (Llama4PythonicParser, " [f(a=1)]<|python_end|> So", [f(a=1), content(" So")]),
    (Olmo3Parser, "<function_calls>\nf(a=null)\nh()\n</function_calls>", [f(a=None), ("call", "h", "{}")]),
    (Olmo3Parser, "<function_calls>f(a='</function_calls>')", [f(a="</function_calls>")]),
    (ToolCodeParser, "So:\n```tool_code\nf(a='b')\n```\nDone", [content("So:\n"), f(a="b"), content("\nDone")]),
    (
        FunctionGemmaParser,
        "<start_function_call>call:f{s:<escape>{a,<escape>,n:<escape>5<escape>,x:1.50,q:{k:[1,<escape>b<escape>],"
        "<escape>r<escape>:null},u:Hi there}<end_function_call>",
        [("call", "f", '{"s": "{a,", "n": 5, "x": 1.50, "q": {"k": [1, "b"], "r": null}, "u": "Hi there"}')],
    ),
    (Gemma4Parser, 'So <|tool_call>call:f{s:<|"|><escape><|"|>,}', [content("So "), f(s="<escape>")]),
]


@pytest.mark.parametrize(("cls", "text", "expected"), FOUND)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_found(
    parse: Any, cls: type[ToolCallParser], text: str, expected: list[tuple[str, ...]], size: int
) -> None:
    found = parse(cls(TOOLS), text, [size])

    if expected[-1] == content(""):
        found, expected = found[:-1], expected[:-1]
    assert found == expected


#: What is no call, to the last character; and how many calls seemed to begin.
CONTENT: list[tuple[type[ToolCallParser], str, int]] = [
    (Qwen3CoderParser, "<tool_call>\n{}</tool_call>", 1),
    (Qwen3CoderParser, "<tool_call>\n<function=f> writes a call", 1),
    (Qwen3CoderParser, "<tool_call>\n<function=f>\n</tool_call>", 1),
    (Qwen3CoderParser, "<function=unknown>\n</function>", 1),
    (Qwen3CoderParser, "<function=f", 1),
    (Qwen3CoderParser, f"<function={'f' * 300}>", 1),
    (Qwen3CoderParser, f"<tool_call><function=f><parameter={'f' * 300}>", 1),
    (Qwen3CoderParser, "<tool_call><function=f><parameter=>", 1),
    (Qwen3CoderParser, "a < b <tool <function <", 0),
    (Glm45Parser, '<tool_call>{"name": "f"}</tool_call>', 1),
    (Glm45Parser, "<tool_call>f one</tool_call>", 1),
    (Glm45Parser, "<tool_call>f<arg_key>s</arg_key>a</tool_call>", 1),
    (MiniMaxM2Parser, "<minimax:tool_call></minimax:tool_call>", 1),
    (MiniMaxM2Parser, "<invoke name=f>", 0),
    (DeepSeekV32Parser, "<｜DSML｜function_calls>\nf", 1),
    (Llama4PythonicParser, "<|python_start|>print(1)<|python_end|>", 1),
    (Olmo3Parser, "<function_calls>\n</function_calls>", 1),
    (Olmo3Parser, "<function_calls>f(a=1 # one\n)</function_calls>", 1),
    (Olmo3Parser, "<function_calls>f(a=1, a=2)</function_calls>", 1),
    (FunctionGemmaParser, "<start_function_call>f{}<end_function_call>", 1),
    (FunctionGemmaParser, "<start_function_call>call:f{s}<end_function_call>", 1),
    (FunctionGemmaParser, "call:f{}", 0),
    (Gemma4Parser, f"<|tool_call>call:f{'{' * 2}", 1),
]


@pytest.mark.parametrize(("cls", "text", "malformed"), CONTENT)
@pytest.mark.parametrize("size", [1, 1000])
def test_malformed_calls_are_content_and_counted(
    parse: Any, cls: type[ToolCallParser], text: str, malformed: int, size: int
) -> None:
    parser = cls(TOOLS)

    assert parse(parser, text, [size]) == [("content", text)]
    assert parser.malformed == malformed


def test_a_string_comes_as_it_is_written_and_other_values_at_their_end() -> None:
    parser = Qwen3CoderParser(TOOLS)

    assert parser.feed(f"{Q}<parameter=s") == []
    [start, first] = parser.feed('>\na "')
    assert isinstance(start, ToolCallStart)
    assert first == ToolCallArguments(0, '{"s": "a \\"')
    assert parser.feed("é\n") == [ToolCallArguments(0, "é")]
    assert parser.feed("b\n</param") == [ToolCallArguments(0, "\\nb")]
    assert parser.feed("eter>\n") == []
    assert parser.feed("<parameter=n>\n1") == [ToolCallArguments(0, '", "n": ')]
    assert parser.feed("2\n</parameter>") == []
    assert parser.feed("\n</function>") == [ToolCallArguments(0, "12}")]


def test_a_call_that_is_cut_off_is_no_object_and_loses_nothing(parse: Any) -> None:
    text = f"{Q}{p('s', 'a')}<parameter=n>\n12"

    assert parse(Qwen3CoderParser(TOOLS), text) == [("call", "f", '{"s": "a", "n": 12')]
    buffered = Qwen3CoderParser(TOOLS)
    buffered.buffer_calls()
    assert parse(buffered, text) == [("content", text)]


# Properties of all formats.

KEYS = ("s", "t", "n", "x", "b", "o", "l", "m")
TEXTS = st.text(st.sampled_from("ab \n\t\"'\\<>/{}[]=:,é😀\u2028"), max_size=12)
VALUES = {
    "s": TEXTS,
    "t": TEXTS,
    "n": st.integers(),
    "x": st.floats(allow_nan=False, allow_infinity=False),
    "b": st.booleans(),
    "o": st.fixed_dictionaries({}, optional={"k": TEXTS, "j": st.integers()}),
    "l": st.lists(TEXTS, max_size=3),
    "m": st.none() | TEXTS.filter(lambda text: text.strip().lower() not in ("null", "none")),
}
CALLS = st.lists(st.tuples(st.sampled_from("fg"), st.fixed_dictionaries({}, optional=VALUES)), min_size=1, max_size=3)
SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=6)
relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@relaxed
@given(calls=CALLS, sizes=SIZES, before=st.sampled_from(["", "So.\n", "a < b "]))
@pytest.mark.parametrize("form", ALL)
def test_calls_come_as_the_model_meant_them(
    parse: Any, form: Format, calls: list[tuple[str, dict[str, Any]]], sizes: list[int], before: str
) -> None:
    parsed = parse(form.parser(TOOLS), before + form.write(calls), sizes)

    expected: list[Any] = [content(before)] if before else []
    assert [each if each[0] == "content" else (each[1], json.loads(each[2])) for each in parsed] == expected + calls


@pytest.mark.parametrize("form", ALL)
def test_an_answer_that_is_cut_off_anywhere_begins_with_the_same_calls(parse: Any, form: Format) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("f", {"s": "a\n<b>", "n": 5}), ("g", {"o": {"k": "c"}, "m": None})]
    text = f"So.\n{form.write(calls)}"
    whole = [("f", calls[0][1]), ("g", calls[1][1])]

    for end in range(len(text)):
        parser = form.parser(TOOLS)
        parser.buffer_calls()
        parsed = parse(parser, text[:end], [3])
        found = [(each[1], json.loads(each[2])) for each in parsed if each[0] == "call"]
        assert found == whole[: len(found)]
        assert "".join(each[1] for each in parsed if each[0] == "content").startswith("So.\n"[:end])


# Mutations.

#: Words that must not be lost.
_WORD = re.compile(r"Q\d\d\dZ")


def samples(form: Format) -> list[str]:
    words = iter(range(100, 1000))

    def word() -> str:
        return f"Q{next(words)}Z"

    return [
        f"{word()} {form.write([('f', {'s': word()})])} {word()}",
        form.write([("f", {"s": f"a\n{word()}", "n": 5, "o": {"k": word()}}), ("g", {"m": word(), "b": True})]),
        f"{word()}\n{form.write([('f', {}), ('g', {'l': [word(), word()], 'x': 1.5})])}\n{word()}",
    ]


def mutated(dice: random.Random, form: Format, texts: list[str]) -> str:
    """Return a sample with parts cut out, repeated, exchanged and put in."""
    text = dice.choice(texts)
    for _ in range(dice.randint(1, 4)):
        at, end = sorted((dice.randint(0, len(text)), dice.randint(0, len(text))))
        end = min(end, at + dice.choice((1, 3, 20, 200)))
        match dice.randrange(5):
            case 0:
                text = text[:at] + text[end:]
            case 1:
                text = text[:end] + text[at:]
            case 2:
                text = text[:at] + dice.choice(form.tags) + text[at:]
            case 3:
                text = text[:at] + dice.choice("<>/=\"'{}[](),:\n \\#x\0é") + text[end:]
            case _:
                text = text[:end]
    return text


def said(deltas: list[ParserDelta]) -> str:
    """Return all text of deltas, in order."""
    out: list[str] = []
    kind: type | None = None
    for delta in deltas:
        if type(delta) is not kind:
            out.append("|")
            kind = type(delta)
        out.append(delta.name if isinstance(delta, ToolCallStart) else delta.text)
    return "".join(out)


@pytest.mark.parametrize("form", ALL)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [100, pytest.param(100_000, marks=pytest.mark.full)])
def test_mutated_answers_lose_no_word(parse: Any, form: Format, count: int) -> None:
    dice = random.Random(form.parser.NAME)
    texts = samples(form)
    for _ in range(count):
        text = mutated(dice, form, texts)
        parser = form.parser(TOOLS)
        buffered = dice.random() < 0.3
        if buffered:
            parser.buffer_calls()
        size = dice.choice((1, 2, 5, 11))
        deltas: list[ParserDelta] = []
        for at in range(0, len(text), size):
            deltas += parser.feed(text[at : at + size])
        deltas += parser.finish()
        kept = iter(found := _WORD.findall(said(deltas)))
        assert all(word in kept for word in _WORD.findall(text)), (text, deltas)
        # A tag that is taken out may join the halves of a word.
        joined = re.sub("|".join((*map(re.escape, form.tags), r"\s", "['\"]")), "", text)
        assert Counter(found) <= Counter(_WORD.findall(joined))
        other = form.parser(TOOLS)
        if buffered:
            other.buffer_calls()
        calls = parse(other, text)
        again = form.parser(TOOLS)
        if buffered:
            again.buffer_calls()
            assert all(isinstance(json.loads(each[2]), dict) for each in calls if each[0] == "call")
        assert parse(again, text, [size]) == calls, text


def test_only_possible_markup_is_held_back() -> None:
    parser = Qwen3CoderParser(TOOLS)

    assert parser.feed("See: <") == [ContentDelta("See: ")]
    assert parser.feed("b> <func") == [ContentDelta("<b> ")]
    assert parser.feed("tional>") == [ContentDelta("<functional>")]
