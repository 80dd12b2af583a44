"""Every format of calls that is JSON, and Harmony: what models write, cut off, broken and mutated."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from dynamo_core import ContentDelta, ParserDelta, ReasoningDelta, ToolCallArguments, ToolCallParser, ToolCallStart
from dynamo_plugin_parsers_standard.harmony import GptOssParser
from dynamo_plugin_parsers_standard.json_formats import (
    JSON_PARSERS,
    DeepSeekV3Parser,
    DeepSeekV31Parser,
    Granite20bFcParser,
    GraniteParser,
    HermesParser,
    KimiK2Parser,
    Llama3JsonParser,
    MistralParser,
    NemotronParser,
    Phi4MiniParser,
)
from hypothesis import given
from hypothesis import strategies as st

#: Names of tools with the arguments as the model writes them.
Calls = Sequence[tuple[str, str]]


def objects(calls: Calls, key: str = "arguments") -> list[str]:
    return [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in calls]


def listed(calls: Calls) -> str:
    return f"[{', '.join(objects(calls))}]"


def hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects(calls))


def hermes_at_once(calls: Calls) -> str:
    return "<tool_call>\n" + "\n".join(objects(calls)) + "\n</tool_call>"


def deepseek_v3(calls: Calls) -> str:
    written = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Calls) -> str:
    written = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>" for name, arguments in calls]
    return "<｜tool▁calls▁begin｜>" + "".join(written) + "<｜tool▁calls▁end｜>"


def kimi_k2(calls: Calls) -> str:
    written = [
        f"<|tool_call_begin|>functions.{name}:{at}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for at, (name, arguments) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(written) + "<|tool_calls_section_end|>"


def gpt_oss(calls: Calls) -> str:
    return "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
        for name, arguments in calls
    )


def gpt_oss_in_the_role(calls: Calls) -> str:
    return "".join(
        f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{arguments}<|call|>"
        for name, arguments in calls
    )


@dataclass(frozen=True)
class Written:
    """A way in which models write calls."""

    parser: type[ToolCallParser]
    write: Callable[[Calls], str]
    #: What may be missing in the output between pieces of the answer.
    markup: str
    #: Whether content may stand before and after the calls.
    around: bool = True

    def tags(self) -> str:
        return "|".join(map(re.escape, self.parser.MARKERS))


_STRING = r'"(?:[^"\\\x00-\x1f]|\\.)*+"'
_CARELESS = r'"(?s:[^"\\]|\\.)*+"'
#: Tags, and the parts of objects that hold calls.
JSON_TOKENS = rf"\s|[\[\]{{}}:,]|{_STRING}|-?\d[\d.eE+-]*+|true|false|null"
#: The same of Mistral, with a name before the arguments, which may follow it without a tag.
MISTRAL = r"\[TOOL_CALLS\]\s*[\w.-]+\s*(?:\[CALL_ID\]\s*[\w.-]*\s*)?(?:\[ARGS\]|(?=\{))|" + JSON_TOKENS
HARMONY = (
    r"\s|<\|start\|>\s*[a-z]*|<\|channel\|>\s*[a-z]*(?:\s*to=[^\s<]*)?\s*[\w-]*|to=[^\s<]*"
    r"|<\|constrain\|>\s*[\w-]*"
)

WRITTEN = {
    "hermes": Written(HermesParser, hermes, JSON_TOKENS),
    "hermes, at once": Written(HermesParser, hermes_at_once, JSON_TOKENS),
    "hermes, a list": Written(HermesParser, lambda calls: f"<tool_call>{listed(calls)}</tool_call>", JSON_TOKENS),
    "llama3_json": Written(
        Llama3JsonParser, lambda calls: "; ".join(objects(calls, "parameters")), JSON_TOKENS + "|;", around=False
    ),
    "llama3_json, tagged": Written(
        Llama3JsonParser,
        lambda calls: "".join(f"<|python_tag|>{each}" for each in objects(calls, "parameters")),
        JSON_TOKENS + "|;",
        around=False,
    ),
    "mistral": Written(MistralParser, lambda calls: f"[TOOL_CALLS] {listed(calls)}", MISTRAL),
    "mistral, names": Written(
        MistralParser,
        lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls),
        MISTRAL,
    ),
    "deepseek_v3": Written(
        DeepSeekV3Parser,
        deepseek_v3,
        r"\s|```|<｜tool▁call▁begin｜>\s*[\w.-]+\s*<｜tool▁sep｜>\s*[\w.-]+\s*```json",
    ),
    "deepseek_v31": Written(DeepSeekV31Parser, deepseek_v31, r"\s|<｜tool▁call▁begin｜>\s*[\w.-]+\s*<｜tool▁sep｜>"),
    "kimi_k2": Written(KimiK2Parser, kimi_k2, r"\s|<\|tool_call_begin\|>\s*[\w.:-]+\s*<\|tool_call_argument_begin\|>"),
    "granite": Written(GraniteParser, lambda calls: f"<|tool_call|>{listed(calls)}", JSON_TOKENS),
    "granite, with tags": Written(GraniteParser, lambda calls: f"<tool_call>{listed(calls)}</tool_call>", JSON_TOKENS),
    "granite_20b_fc": Written(
        Granite20bFcParser,
        lambda calls: " ".join(f"<function_call> {each}" for each in objects(calls)),
        JSON_TOKENS,
    ),
    "phi4_mini": Written(Phi4MiniParser, lambda calls: f"functools{listed(calls)}", JSON_TOKENS),
    "phi4_mini, with tags": Written(
        Phi4MiniParser, lambda calls: f"<|tool_call|>{listed(calls)}<|/tool_call|>", JSON_TOKENS
    ),
    "nemotron": Written(NemotronParser, lambda calls: f"<TOOLCALL>{listed(calls)}</TOOLCALL>", JSON_TOKENS),
    "gpt_oss": Written(GptOssParser, gpt_oss, HARMONY, around=False),
    "gpt_oss, in the role": Written(GptOssParser, gpt_oss_in_the_role, HARMONY, around=False),
}
FORMATS = pytest.mark.parametrize("written", WRITTEN.values(), ids=list(WRITTEN))

NESTED = '{"a": {"b": [1, {"c": "}]"}], "d": null}, "e": -1.5e3}'
ESCAPED = r'{"a": "\u00e9\ud83d\ude00\\\" \n", "b": "Grüße 世界 🎉", "c": "\\u12"}'
#: Arguments that spell markup.
TAGS_INSIDE = '{"a": "</tool_call> [TOOL_CALLS] ``` <TOOLCALL> functools["}'


def test_every_format_is_tried() -> None:
    assert {written.parser for written in WRITTEN.values()} == {*JSON_PARSERS, GptOssParser}


@FORMATS
@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    "calls",
    [
        [("f", '{"a": 1}')],
        [("f", '{"a": 1}'), ("g", "{}")],
        [("f", "{}"), ("f", "{}"), ("g", NESTED)],
        [("f", ESCAPED)],
        [("f", TAGS_INSIDE)],
    ],
    ids=["one", "parallel", "nested", "escaped", "markup inside"],
)
def test_calls_come_with_their_arguments_as_they_were_written(
    parse: Any, tools: Any, written: Written, calls: list[tuple[str, str]], size: int
) -> None:
    parser = written.parser(tools)

    assert parse(parser, written.write(calls), [size]) == [("call", name, arguments) for name, arguments in calls]
    assert parser.malformed == 0


@pytest.mark.parametrize("written", [each for each in WRITTEN.values() if each.around])
def test_text_before_between_and_after_calls_is_content(parse: Any, tools: Any, written: Written) -> None:
    one, other = written.write([("f", '{"a": 1}')]), written.write([("g", "{}")])

    assert parse(written.parser(tools), f"Well:\n{one} So. {other} \nDone.\n") == [
        ("content", "Well:\n"),
        ("call", "f", '{"a": 1}'),
        ("content", " So. "),
        ("call", "g", "{}"),
        ("content", " \nDone.\n"),
    ]


@FORMATS
@pytest.mark.parametrize("buffered", [False, True])
def test_a_cut_off_answer_adds_nothing_to_its_text(parse: Any, tools: Any, written: Written, buffered: bool) -> None:
    text = written.write([("f", ESCAPED), ("g", '{"b": 2}')])
    for end in range(len(text)):
        parser = written.parser(tools)
        if buffered:
            parser.buffer_calls()

        parser.cut_off = True

        parsed = parse(parser, text[:end], [2])

        assert not is_lost(parsed, text[:end], written)
        assert not parser.repairs
        assert [ESCAPED, '{"b": 2}'][: len(arguments_of(parsed))] == arguments_of(parsed) or not buffered
        assert all(ESCAPED.startswith(each) or each == '{"b": 2}'[: len(each)] for each in arguments_of(parsed))


def arguments_of(parsed: Sequence[tuple[str, ...]]) -> list[str]:
    return [each[2] for each in parsed if each[0] == "call"]


@FORMATS
def test_no_delta_of_arguments_ends_inside_an_escape(tools: Any, written: Written) -> None:
    text = written.write([("f", ESCAPED)])
    for size in range(1, 9):
        parser = written.parser(tools)
        deltas = [delta for at in range(0, len(text), size) for delta in parser.feed(text[at : at + size])]
        told = [delta.text for delta in deltas if isinstance(delta, ToolCallArguments)]
        assert "".join(told) == ESCAPED
        for number in range(1, len(told) + 1):
            value = re.search(r'"a": ("(?:[^"]|(?<=\\)")*)$', "".join(told[:number]))
            if value is not None:
                json.loads(value[1] + '"').encode()


@FORMATS
def test_arguments_stream_before_the_call_is_closed(tools: Any, written: Written) -> None:
    parser = written.parser(tools)
    text = written.write([("f", '{"a": "one two three"}')])

    deltas = parser.feed(text[: text.index("two")])

    assert [type(delta) for delta in deltas] == [ToolCallStart, ToolCallArguments]
    assert isinstance(deltas[1], ToolCallArguments)
    assert deltas[1].text == '{"a": "one '


#: Arguments with one slip each, what they mean, and the kind of repair.
SLIPS: list[tuple[str, Any, str]] = [
    ('{"a": "one\n\ntwo"}', {"a": "one\n\ntwo"}, "control_character"),
    ('{"a": "\tone", "b": "\x01"}', {"a": "\tone", "b": "\x01"}, "control_character"),
    ('{"a": "\\d+ C:\\Users \\u12"}', {"a": "\\d+ C:\\Users \\u12"}, "backslash"),
    ('{"a": "it\\\'s"}', {"a": "it's"}, "backslash"),
    ('{"a": [1, 2,], "b": {"c": 3}, }', {"a": [1, 2], "b": {"c": 3}}, "trailing_comma"),
    ('{"a": 1', {"a": 1}, "missing_bracket"),
    ('{"a": {"b": "x"}', {"a": {"b": "x"}}, "missing_bracket"),
    ('{"a": 1}}', {"a": 1}, "surplus_bracket"),
]


@FORMATS
@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("size", [1, 1000])
def test_unambiguous_slips_are_repaired_and_counted(
    parse: Any, tools: Any, written: Written, size: int, buffered: bool
) -> None:
    for arguments, value, kind in SLIPS:
        parser = written.parser(tools)
        if buffered:
            parser.buffer_calls()

        [(_, name, told)] = parse(parser, written.write([("f", arguments)]), [size])

        assert (name, json.loads(told)) == ("f", value)
        assert parser.repairs == {kind: 1}
        assert parser.malformed == 0


TAG_TOO_MANY, BRACKET_TOO_MANY, BRACKET_MISSING = "surplus_tag", "surplus_bracket", "missing_bracket"


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("written", "text", "names", "repairs"),
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call>\n</tool_call>', "f", [TAG_TOO_MANY]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {}}} {"name": "g", "arguments": {}\n</tool_call>',
            "fg",
            [BRACKET_TOO_MANY, BRACKET_MISSING],
        ),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1[TOOL_CALLS]g[ARGS]{}}', "fg", [BRACKET_MISSING, BRACKET_TOO_MANY]),
        ("mistral", '[TOOL_CALLS][{"name": "f"}}, {"name": "g"}, ]', "fg", [BRACKET_TOO_MANY, "trailing_comma"]),
        (
            "llama3_json",
            '{"name": "f", "parameters": {"a": 1}; {"name": "g", "parameters": {}}}',
            "fg",
            [BRACKET_MISSING, BRACKET_TOO_MANY],
        ),
        ("nemotron", '<TOOLCALL>[{"name": "f", "arguments": {}}</TOOLCALL>', "f", [BRACKET_MISSING]),
        ("deepseek_v31", deepseek_v31([("f", "{}")]) + "<｜tool▁calls▁end｜>", "f", [TAG_TOO_MANY]),
        ("gpt_oss", gpt_oss([("f", '{"a": 1 }\n}\n'), ("g", '{"a": 1\n')]), "fg", [BRACKET_TOO_MANY, BRACKET_MISSING]),
    ],
)
def test_brackets_and_tags_that_are_missing_or_too_many_leave_no_content(
    parse: Any, tools: Any, written: str, text: str, names: str, repairs: list[str], size: int
) -> None:
    parser = WRITTEN[written].parser(tools)

    parsed = parse(parser, text, [size])

    assert [each[:2] for each in parsed] == [("call", name) for name in names]
    assert all(is_object(arguments) for arguments in arguments_of(parsed))
    assert parser.repairs == dict.fromkeys(repairs, 1)
    assert parser.malformed == 0


@pytest.mark.parametrize("cut_off", [False, True])
@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}'),
        ("mistral, names", '[TOOL_CALLS]f[ARGS]{"a": 1'),
        ("gpt_oss", '<|channel|>commentary to=functions.f<|message|>{"a": 1'),
    ],
)
def test_the_end_of_a_call_is_repaired_at_the_end_of_an_answer_unless_a_limit_cut_that_off(
    parse: Any, tools: Any, written: str, text: str, cut_off: bool
) -> None:
    parser = WRITTEN[written].parser(tools)
    parser.cut_off = cut_off

    [(_, _, arguments)] = parse(parser, text)

    assert arguments in (['{"a": 1', '{"a": 1}'] if cut_off else ['{"a": 1}'])
    assert parser.repairs == ({} if cut_off else {BRACKET_MISSING: 1})


MALFORMED: list[tuple[type[ToolCallParser], str]] = [
    (HermesParser, "<tool_call>f(a=1)</tool_call>"),
    (HermesParser, '<tool_call>{"name": 1}</tool_call>'),
    (HermesParser, "<tool_call>"),
    (Llama3JsonParser, "<|python_tag|>print(1)"),
    (MistralParser, "[TOOL_CALLS] hello there"),
    (DeepSeekV3Parser, "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
    (DeepSeekV3Parser, "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```python\nf()\n```<｜tool▁call▁end｜>"),
    (DeepSeekV3Parser, "<｜tool▁call▁begin｜>f<｜tool▁sep｜>\n```json\n{}\n```"),
    (DeepSeekV31Parser, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜>"),
    (DeepSeekV31Parser, "<｜tool▁calls▁begin｜>f<｜tool▁sep｜>{}"),
    (KimiK2Parser, "<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|>{}"),
    (KimiK2Parser, "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>x<|tool_call_end|>"),
    (GraniteParser, '<|tool_call|>{"name": "f"}'),
    (GraniteParser, "<tool_call>[]</tool_call>"),
    (Granite20bFcParser, "<function_call> f()"),
    (Phi4MiniParser, "functools.partial(f)"),
    (Phi4MiniParser, "<|tool_call|>[f]<|/tool_call|>"),
    (NemotronParser, "<TOOLCALL>[1]</TOOLCALL>"),
    (GptOssParser, "<|start|>assistant<|channel|>commentary to=functions.f<|message|>f()<|call|>"),
    (GptOssParser, "<|channel|>commentary to=functions.f now or never<|message|>{}<|call|>"),
]


@pytest.mark.parametrize(("cls", "text"), MALFORMED)
@pytest.mark.parametrize("size", [1, 1000])
def test_a_malformed_call_is_content_and_counted(
    parse: Any, tools: Any, cls: type[ToolCallParser], text: str, size: int
) -> None:
    parser = cls(tools)

    assert parse(parser, text, [size]) == [("content", text)]
    assert parser.malformed == 1


def test_a_sound_call_follows_a_malformed_one_in_its_section(parse: Any, tools: Any) -> None:
    sound = deepseek_v31([("f", "{}")])
    broken = sound.replace("{}", "{]")

    parser = DeepSeekV31Parser(tools)
    assert parse(parser, broken + sound) == [
        ("call", "f", "{"),
        ("content", "]<｜tool▁call▁end｜>"),
        ("call", "f", "{}"),
    ]
    assert parser.malformed == 1


def test_calls_of_a_section_count_without_its_tags(parse: Any, tools: Any) -> None:
    bare = kimi_k2([("f", "{}")]).replace("<|tool_calls_section_begin|>", "").replace("<|tool_calls_section_end|>", "")

    assert parse(KimiK2Parser(tools), bare) == [("call", "f", "{}")]


def ids_of(deltas: Sequence[ParserDelta]) -> list[str]:
    return [delta.id for delta in deltas if isinstance(delta, ToolCallStart)]


def test_a_call_of_kimi_keeps_the_id_that_the_model_wrote_unless_another_call_has_it(tools: Any) -> None:
    text = kimi_k2([("f", "{}"), ("g", "{}")])

    assert ids_of(KimiK2Parser(tools).feed(text)) == ["functions.f:0", "functions.g:1"]
    first, second = ids_of(KimiK2Parser(tools).feed(text.replace("g:1", "f:0")))
    assert first == "functions.f:0"
    assert second not in ("", first)


HARMONY_ANSWERS: list[tuple[str, list[tuple[str, ...]]]] = [
    ("<|channel|>final<|message|>Hi.<|return|>", [("content", "Hi.")]),
    (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi.",
        [("reasoning", "Hm."), ("content", "Hi.")],
    ),
    (
        "<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
        [("content", "I look."), ("call", "f", "{}")],
    ),
    (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", [("call", "f", "{}")]),
    ("<|channel|>analysis to=functions.f code<|message|>{}<|call|>", [("call", "f", "{}")]),
    ("<|channel|>commentary to=f<|message|>{}<|call|>", [("call", "f", "{}")]),
    ("<|channel|>commentary to=functions.f<|message|><|call|>", [("call", "f", "{}")]),
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", [("reasoning", "1 + 1")]),
    ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hi.", [("reasoning", "Hm."), ("content", "Hi.")]),
    ("<|start|>assistant<|start|>assistant<|channel|>final<|message|>Hi.", [("content", "Hi.")]),
    ("Hi.<|return|>", [("content", "Hi.")]),
    ("to be<|end|>", [("content", "to be")]),
    ("<|channel|>analysis<|message|>Hm.<|end|>\n<|start|>assist", [("reasoning", "Hm.")]),
    ("<|channel|>thought<|message|>Hm.<|end|>", [("content", "<|channel|>thought<|message|>Hm.<|end|>")]),
    ("<|start|>user<|message|>Hi.<|end|>", [("content", "<|start|>user<|message|>Hi.<|end|>")]),
    (
        '<|channel|>commentary to=functions.f<|message|>{"a": [<|end|><|start|>assistant<|channel|>final<|message|>Hi.',
        [("call", "f", '{"a": ['), ("content", "Hi.")],
    ),
]


@pytest.mark.parametrize(("text", "expected"), HARMONY_ANSWERS)
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_harmony_messages_are_routed_by_their_headers(
    parse: Any, tools: Any, text: str, expected: list[tuple[str, ...]], size: int
) -> None:
    assert parse(GptOssParser(tools), text, [size]) == expected


def test_tags_that_are_spelled_are_content_where_the_model_has_them_as_tokens(tools: Any) -> None:
    parser = GptOssParser(tools)
    parser.has_marker_tokens(frozenset(GptOssParser.MARKERS))

    deltas = parser.feed_marker("<|channel|>") + parser.feed("final") + parser.feed_marker("<|message|>")
    deltas += parser.feed("Write <|end|> or <|call") + parser.feed("|>.") + parser.feed_marker("<|end|>")

    assert "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta)) == "Write <|end|> or <|call|>."


def test_a_marker_token_ends_a_partial_tag(tools: Any) -> None:
    parser = GptOssParser(tools)

    deltas = parser.feed("<|channel|>analysis<|message|>a <|e") + parser.feed_marker("<|end|>") + parser.finish()

    assert "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta)) == "a <|e"


IN_ARGUMENTS = ("control_character", "backslash", "trailing_comma")


def mended(text: str, at: int, out: str, done: int, kinds: Collection[str]) -> Iterator[tuple[int, int]]:
    """Yield how repairs of these kinds may go on from two places, in what was written and in what was made of it."""
    char = text[at : at + 1]
    if "control_character" in kinds and "" < char < " " and out.startswith(json.dumps(char)[1:-1], done):
        yield at + 1, done + len(json.dumps(char)) - 2
    if "backslash" in kinds and char == "\\":
        if out.startswith("\\\\", done):
            yield at + 1, done + 2
        if text.startswith("'", at + 1) and out.startswith("'", done):
            yield at + 2, done + 1
    if ("trailing_comma" in kinds and char == ",") or ("surplus_bracket" in kinds and char in ("}", "]")):
        yield at + 1, done
    if "missing_bracket" in kinds and out[done : done + 1] in ("}", "]"):
        yield at, done + 1


def is_lost(parsed: Sequence[tuple[str, ...]], text: str, written: Written, repairs: Collection[str] = ()) -> bool:
    """Return whether something of a text is in no piece of the output, and is not the markup of calls either.

    The pieces are content, reasoning and arguments, in order. What is missing in them must consist of the tags of the
    format, white space, and the parts of calls beside the arguments. `repairs` says what else may differ.
    """
    out, omitted = "", set()
    for kind, *words in parsed:
        if kind == "call" and words[-1] == "{}":
            omitted.add(len(out))
        out += words[-1]
    markup = written.markup.replace(_STRING, _CARELESS) if repairs else written.markup
    patterns = [re.compile(each) for each in (markup, written.tags())]
    left, seen = [(0, 0)], set()
    while left:
        at, done = place = left.pop()
        if place == (len(text), len(out)):
            return False
        if place in seen:
            continue
        seen.add(place)
        # Arguments that the model left out.
        left += [(at, done + 2)] if done in omitted else []
        left += [(match.end(), done) for each in patterns if (match := each.match(text, at))]
        left += [(at + 1, done + 1)] if text[at : at + 1] == out[done : done + 1] != "" else []
        left += mended(text, at, out, done, repairs)
    return True


def mutated(dice: random.Random, written: Written) -> str:
    """Return an answer in a format with some parts gone, doubled, exchanged, or others put in."""
    calls = [(dice.choice("fg"), dice.choice(('{"a": 1}', "{}", NESTED, ESCAPED))) for _ in range(dice.randint(1, 3))]
    text = dice.choice(("", "Well. ", "\n")) + written.write(calls) + dice.choice(("", " So.", "\n"))
    parts = (*written.parser.MARKERS, "{", "}", "[", "]", '"', ",", "\\", "f", ":", "\n", "x", "```", "é", "")
    for _ in range(dice.randint(1, 4)):
        start = dice.randrange(len(text) + 1)
        end = min(len(text), start + dice.choice((0, 0, 1, 2, 5, 20)))
        match dice.randrange(4):
            case 0:
                text = text[:start] + text[end:]
            case 1:
                text = text[:end] + text[start:]
            case 2:
                text = text[:start] + dice.choice(parts) + text[end:]
            case _:
                text = text[:start]
    return text


def pieces(dice: random.Random, text: str, markers: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield a text in pieces of any size, and which of them are special tokens."""
    pattern = re.compile("|".join(map(re.escape, markers)))
    at = 0
    while at < len(text):
        marker = pattern.match(text, at)
        if marker is not None and dice.random() < 0.5:
            yield marker[0], True
            at = marker.end()
        else:
            size = dice.choice((1, 1, 2, 3, 7, 30))
            yield text[at : at + size], False
            at += size


def is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


class Replayed:
    """Returns deltas that are there already."""

    def __init__(self, deltas: list[ParserDelta]) -> None:
        self.finish = lambda: deltas


@FORMATS
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [100, pytest.param(100_000, marks=pytest.mark.full)])
def test_mutated_answers_raise_nothing_and_lose_nothing(parse: Any, tools: Any, written: Written, count: int) -> None:
    """Parses mutated answers, whole and in pieces."""
    dice = random.Random(count)
    for _ in range(count):
        text = mutated(dice, written)
        whole = written.parser(tools)
        expected = parse(whole, text)
        sound = [each for each in arguments_of(expected) if is_object(each)]
        # Of a call that breaks in the end, repairs are told as they come, and not counted.
        broken = whole.malformed or len(sound) < len(arguments_of(expected))
        assert not is_lost(expected, text, written, {*whole.repairs, *(IN_ARGUMENTS if broken else ())}), text
        buffered = written.parser(tools)
        buffered.buffer_calls()
        assert arguments_of(parse(buffered, text)) == sound, text
        # The end of a section that began with a call that is text is a tag too many.
        assert {**buffered.repairs, "surplus_tag": 0} == {**whole.repairs, "surplus_tag": 0}, text
        parser, deltas = written.parser(tools), []
        for piece, is_token in pieces(dice, text, written.parser.MARKERS):
            deltas += parser.feed_marker(piece) if is_token else parser.feed(piece)
        deltas += parser.finish()
        assert parse(Replayed(deltas), "") == expected, text
        assert parser.malformed == whole.malformed >= 0, text
        assert parser.repairs == whole.repairs, text


@FORMATS
@given(data=st.data())
def test_any_cut_of_any_calls_parses_the_same(written: Written, data: st.DataObject) -> None:
    values = st.recursive(st.text(max_size=5) | st.integers() | st.none(), lambda inner: st.lists(inner, max_size=3))
    arguments = st.dictionaries(st.text(max_size=3), values, max_size=3)
    calls = data.draw(st.lists(st.tuples(st.sampled_from("fg"), arguments), min_size=1, max_size=3))
    ascii_only = data.draw(st.booleans())
    text = written.write([(name, json.dumps(each, ensure_ascii=ascii_only)) for name, each in calls])
    dice = random.Random(data.draw(st.integers(0, 1000)))
    parser = written.parser([{"type": "function", "function": {"name": name}} for name in "fg"])

    deltas: list[ParserDelta] = []
    for piece, is_token in pieces(dice, text, written.parser.MARKERS):
        deltas += parser.feed_marker(piece) if is_token else parser.feed(piece)
    deltas += parser.finish()

    assert [delta.name for delta in deltas if isinstance(delta, ToolCallStart)] == [name for name, _ in calls]
    for index, (_, expected) in enumerate(calls):
        told = [delta.text for delta in deltas if isinstance(delta, ToolCallArguments) and delta.index == index]
        assert json.loads("".join(told)) == expected
