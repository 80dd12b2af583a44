"""Special tokens that a format is made of reach its parser as tokens, whatever the request says of special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from dynamo_core import (
    ContentDelta,
    FinishReason,
    LLMEngineOutput,
    OutputOptions,
    ParserDelta,
    Parsers,
    PreprocessedRequest,
    ReasoningDelta,
    StopConditions,
    ToolCallParser,
    ToolCallStart,
)
from dynamo_core.protocol import ModelCard
from dynamo_generation.choices.call_filter import CallFilter
from dynamo_generation.choices.marker_tokens import MarkerStore
from dynamo_generation.choices.parsed_choice import AnswerParser, ParsedChoice
from dynamo_plugin_parsers_standard.think_tags import Qwen3Parser
from dynamo_testing.tiny_model import make_tokenizer_folder
from dynamo_text import load_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from plugins.frontends.conftest import FakeModel

TOOLS = [{"type": "function", "function": {"name": "f"}}]
#: Special tokens: the first two are those of the format below.
OPEN, CLOSE, OTHER = "<call>", "</call>", "<other>"


class Noting(ToolCallParser):
    """Notes what it is fed; a marker and all that follows up to the next are a call of that name."""

    NAME = "noting"
    MARKERS = (OPEN, CLOSE, "<no token>")
    made: ClassVar[list[Noting]] = []

    def __init__(self, tools: Any) -> None:
        super().__init__(tools)
        self.fed: list[str] = []
        self.tokens: list[frozenset[str]] = []
        self.made.append(self)

    def has_marker_tokens(self, markers: frozenset[str]) -> None:
        self.tokens.append(markers)

    def feed(self, text: str) -> list[ParserDelta]:
        self.fed.append(text)
        return [ContentDelta(text)]

    def feed_marker(self, marker: str) -> list[ParserDelta]:
        self.fed.append(f"MARKER {marker}")
        self.malformed += marker == CLOSE
        return []

    def finish(self) -> list[ParserDelta]:
        return []


class Telling(Noting):
    """Tells reasoning, too."""

    TELLS_REASONING = True

    def feed(self, text: str) -> list[ParserDelta]:
        self.fed.append(text)
        return [ReasoningDelta(text)]


@pytest.fixture(autouse=True)
def _none_made() -> None:
    Noting.made.clear()


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a tokenizer that has the markers as special tokens."""
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(
        str(make_tokenizer_folder(tmp_path_factory.mktemp("model"), vocab_size=300) / "tokenizer.json")
    )
    library.add_special_tokens([OPEN, CLOSE, OTHER, "<tool_call>"])
    return load_tokenizer("hf", {"tokenizer.json": library.to_str().encode()})


class OldTokenizer:
    """A tokenizer of a third party that knows nothing of `keep`."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def stream(self, *, skip_special_tokens: bool = True) -> Any:
        return self._inner.stream(skip_special_tokens=skip_special_tokens)


def model_with(tokenizer: Any) -> Any:
    """Return as much of a model as the store looks at."""
    model = FakeModel(ModelCard(name="m", instance_id=1), {})
    model.tokenizer = tokenizer
    return model


def spelled(tokenizer: Any, text: str) -> list[int]:
    """Return ordinary tokens that are shown as this text, also where it is that of a special token."""
    ids: list[int] = []
    for character in text:
        ids += tokenizer.encode(character, add_special_tokens=False)
    return ids


def fed(tokenizer: Any, items: Sequence[Sequence[int]], reasoning: Any = None, **stop: Any) -> tuple[Noting, Any]:
    """Return a parser that was fed with these items, and the choice."""
    request = PreprocessedRequest(
        model="m", token_ids=[], stop_conditions=StopConditions(**stop), output_options=OutputOptions()
    )
    parser = Noting(TOOLS)
    markers = MarkerStore().find(model_with(tokenizer), Noting, reasoning)
    thoughts = None if reasoning is None else reasoning("")
    every_call = CallFilter(None, parallel=True, ids=set())
    choice = ParsedChoice(0, request, tokenizer, AnswerParser(thoughts, parser, every_call), markers=markers)
    for ids in items:
        choice.feed(LLMEngineOutput(list(ids)))
    choice.feed(LLMEngineOutput([], FinishReason.STOP))
    return parser, choice


def test_markers_come_as_tokens_and_other_special_tokens_are_skipped(tokenizer: Any) -> None:
    ids = tokenizer.encode(f"a{OTHER}b{OPEN}c{CLOSE}{OPEN}", add_special_tokens=False)

    parser, _ = fed(tokenizer, [ids])

    assert parser.fed == ["ab", f"MARKER {OPEN}", "c", f"MARKER {CLOSE}", f"MARKER {OPEN}"]


def test_a_marker_that_is_spelled_out_is_text(tokenizer: Any) -> None:
    parser, _ = fed(tokenizer, [spelled(tokenizer, f"a{OPEN}")])

    assert parser.fed == [f"a{OPEN}"]


def test_a_marker_that_may_begin_a_stop_string_is_text(tokenizer: Any) -> None:
    ids = tokenizer.encode(f"a{OPEN}b{CLOSE}x", add_special_tokens=False)

    parser, choice = fed(tokenizer, [ids], stop=[f"{OPEN}c", f"{CLOSE}x"])

    assert parser.fed == ["a", f"{OPEN}b"]
    assert choice.finish_reason == "stop"
    assert choice.completion_tokens == len(ids)


def test_completion_tokens_include_those_between_a_marker_and_the_stop_string(tokenizer: Any) -> None:
    ids = tokenizer.encode(f"a{OPEN}xbxc", add_special_tokens=False)

    parser, choice = fed(tokenizer, [ids], stop=["x"], min_tokens=3)

    assert parser.fed == ["a", f"MARKER {OPEN}", "xb"]
    assert choice.completion_tokens == 5


def test_a_marker_that_ends_reasoning_is_passed_to_the_call_parser(tokenizer: Any) -> None:
    ids = [*tokenizer.encode("<think>Hm", add_special_tokens=False), *tokenizer.encode("<tool_call>")[-1:]]

    parser, choice = fed(tokenizer, [ids], Qwen3Parser)

    # It is a marker of the reasoning alone; the parser of calls takes it as the text that it is.
    assert parser.fed == ["MARKER <tool_call>"]
    assert choice.finish_reason == "stop"


@given(
    words=st.lists(st.sampled_from(["a", "é", OPEN, CLOSE, OTHER, "<ca", "\n"]), max_size=12),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_the_cuts_of_the_tokens_change_nothing(tokenizer: Any, words: list[str], sizes: list[int]) -> None:
    ids = tokenizer.encode("".join(words), add_special_tokens=False)
    items: list[list[int]] = []
    at = 0
    while at < len(ids):
        size = sizes[len(items) % len(sizes)]
        items.append(ids[at : at + size])
        at += size

    def joined(parser: Noting) -> list[str]:
        out: list[str] = []
        for text in parser.fed:
            if out and "MARKER" not in out[-1] and "MARKER" not in text:
                out[-1] += text
            else:
                out.append(text)
        return out

    assert joined(fed(tokenizer, items)[0]) == joined(fed(tokenizer, [ids])[0])


def test_a_model_is_looked_up_once_and_only_for_markers_that_are_tokens(tokenizer: Any) -> None:
    asked: list[str] = []

    class Counting(OldTokenizer):
        def encode(self, text: str, **options: Any) -> Any:
            asked.append(text)
            return self._inner.encode(text, **options)

    store, model = MarkerStore(), model_with(Counting(tokenizer))

    found = [store.find(model, Noting, None) for _ in range(3)]

    assert asked == list(Noting.MARKERS)
    assert set(found[0].texts.values()) == {OPEN, CLOSE}
    assert found[0] is found[2]
    assert store.find(model_with(load_tokenizer("bytes", {})), Noting, None).ids == frozenset()


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, **fields}


def say(model: Any, ids: Sequence[int]) -> None:
    model.puts(LLMEngineOutput(list(ids), FinishReason.STOP))


@pytest.mark.parametrize(("fields", "text"), [({}, "ab"), ({"skip_special_tokens": False}, f"a{OTHER}b")])
async def test_the_request_decides_about_special_tokens_that_are_no_markers(
    cold_server: Any, tokenizer: Any, fields: dict[str, Any], text: str
) -> None:
    model = cold_server.add_model()
    model.tokenizer, model.parsers = tokenizer, Parsers(Noting)
    say(model, tokenizer.encode(f"a{OTHER}b{OPEN}", add_special_tokens=False))
    await cold_server.start()

    reply = await cold_server.post("/v1/chat/completions", chat(**fields))

    assert reply.json()["choices"][0]["message"]["content"] == text
    assert Noting.made[0].fed == [text, f"MARKER {OPEN}"]
    assert Noting.made[0].tokens == [frozenset({OPEN, CLOSE})]


async def test_a_tokenizer_that_cannot_keep_some_shows_all_special_tokens(cold_server: Any, tokenizer: Any) -> None:
    model = cold_server.add_model()
    model.tokenizer, model.parsers = OldTokenizer(tokenizer), Parsers(Noting)
    say(model, tokenizer.encode(f"a{OTHER}{OPEN}b", add_special_tokens=False))
    await cold_server.start()

    await cold_server.post("/v1/chat/completions", chat())

    assert Noting.made[0].fed == [f"a{OTHER}", f"MARKER {OPEN}", "b"]


async def test_a_tool_parser_with_reasoning_replaces_the_reasoning_parser(cold_server: Any) -> None:
    model = cold_server.add_model()
    model.parsers = Parsers(Telling, Qwen3Parser)
    model.says("<think>Hm</think>")
    await cold_server.start()

    reply = await cold_server.post("/v1/chat/completions", chat())
    assert reply.json()["choices"][0]["message"]["reasoning_content"] == "<think>Hm</think>"

    plain = await cold_server.post("/v1/chat/completions", chat(tools=[]))
    assert plain.json()["choices"][0]["message"]["reasoning_content"] == "Hm"


class InChannels(Noting):
    """Text after OPEN is reasoning, and after CLOSE content."""

    TELLS_REASONING = True

    def __init__(self, tools: Any) -> None:
        super().__init__(tools)
        self._delta: type[ReasoningDelta | ContentDelta] = ContentDelta

    def feed(self, text: str) -> list[ParserDelta]:
        return [self._delta(text)]

    def feed_marker(self, marker: str) -> list[ParserDelta]:
        self._delta = ReasoningDelta if marker == OPEN else ContentDelta
        return []


async def test_reasoning_tokens_are_counted_with_marker_tokens(cold_server: Any, tokenizer: Any) -> None:
    model = cold_server.add_model()
    model.tokenizer, model.parsers = tokenizer, Parsers(InChannels)
    thought, answer = (tokenizer.encode(text, add_special_tokens=False) for text in (f"{OPEN}abc", f"{CLOSE}de"))
    model.puts(*map(LLMEngineOutput, (thought[:1], thought[1:])), LLMEngineOutput(answer, FinishReason.STOP))
    await cold_server.start()

    reply = await cold_server.post("/v1/chat/completions", chat())

    choice = reply.json()["choices"][0]["message"]
    assert (choice["reasoning_content"], choice["content"]) == ("abc", "de")
    # Both markers are markup of the reasoning.
    assert reply.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == len([*thought, *answer[:1]])


async def test_calls_that_are_not_sound_are_counted_by_model(cold_server: Any, tokenizer: Any) -> None:
    model = cold_server.add_model()
    model.tokenizer, model.parsers = tokenizer, Parsers(Noting)
    say(model, tokenizer.encode(f"{CLOSE}{CLOSE}", add_special_tokens=False))
    await cold_server.start()

    await cold_server.post("/v1/chat/completions", chat(n=2))

    rendered = await cold_server.metrics.render()
    assert 'dynamo_frontend_malformed_tool_calls_total{model="m"} 4' in rendered.decode()


async def test_scores_keep_step_with_markers_that_are_part_of_the_text(cold_server: Any, tokenizer: Any) -> None:
    model = cold_server.add_model()
    model.tokenizer, model.parsers = tokenizer, Parsers(Noting)
    ids = tokenizer.encode(f"a{OPEN}b{OTHER}c", add_special_tokens=False)
    model.puts(LLMEngineOutput(ids, FinishReason.STOP, log_probs=[-float(at) for at in range(len(ids))]))
    await cold_server.start()

    reply = await cold_server.post("/v1/chat/completions", chat(logprobs=True))

    scores = reply.json()["choices"][0]["logprobs"]["content"]
    assert [(score["token"], score["logprob"]) for score in scores] == [("a", 0), (OPEN, -1), ("b", -2), ("c", -4)]


def test_a_forced_call_in_the_form_of_the_model_goes_to_its_parser_with_its_tokens() -> None:
    from dynamo_generation.choices.forced_tool_calls import ForcedCalls

    own = Noting(TOOLS)
    forced = ForcedCalls(None, own)

    assert [*forced.feed(" \n"), *forced.feed_marker(CLOSE), *forced.feed("b")] == [
        ContentDelta(" \n"),
        ContentDelta("b"),
    ]
    assert own.fed == [" \n", f"MARKER {CLOSE}", "b"]
    assert forced.malformed == 1

    reported = ForcedCalls("f", Noting(TOOLS))
    assert isinstance(reported.feed('{"a": ')[0], ToolCallStart)
    assert reported.feed_marker(CLOSE)[-1] == ContentDelta(CLOSE)
