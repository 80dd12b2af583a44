"""How many tokens of an answer are told to be reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from dynamo_core import CompletionUsage, FinishReason, LLMEngineOutput, Parsers
from dynamo_generation.choices.reasoning_tokens import ReasoningCount
from dynamo_plugin_parsers_standard.json_formats import HermesParser
from dynamo_plugin_parsers_standard.think_tags import DeepSeekR1Parser, ThinkParser
from dynamo_text import ByteTokenizer
from hypothesis import assume, given
from hypothesis import strategies as st

#: Each byte is a token.
MARKED = "<think>Oslo é.</think>\n\n"
ANSWER = "It rains."
CALL = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def counted(parser: ThinkParser, pieces: Sequence[bytes]) -> int:
    """Return what is counted for an answer whose items are these."""
    tokenizer = ByteTokenizer()
    stream, count = tokenizer.stream(skip_special_tokens=True), ReasoningCount(tokenizer)
    for piece in pieces:
        text = stream.step(list(piece))
        count.add(list(piece), len(text), parser.feed(text) if text else [])
    count.add([], 0, parser.finish())
    return count.total


def cut(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return [*pieces, data[at:]]


TEXTS = st.text(st.sampled_from("a é😀<>/think\n"), max_size=20).map(str.strip)


@given(thought=TEXTS, answer=TEXTS.filter(bool), sizes=st.lists(st.integers(1, 12), max_size=30), opened=st.booleans())
def test_the_count_does_not_depend_on_how_an_answer_is_cut(
    thought: str, answer: str, sizes: list[int], opened: bool
) -> None:
    # The first bytes of a character show no text, so that nothing says on which side they are.
    assume(answer[0].isascii() and thought and "</think>" not in thought and not thought.startswith("<think>"))
    marked = ("" if opened else "<think>") + thought + "</think>\n"
    prompt = "<think>\n" if opened else ""

    found = counted(ThinkParser(prompt), cut((marked + answer).encode(), sizes))

    assert found == len(marked.encode())


def test_the_token_that_completes_the_end_marker_is_reasoning() -> None:
    parser, count = ThinkParser("<think>"), ReasoningCount(ByteTokenizer())
    for number, word in enumerate(["Hm", ".</th", "ink>It", " rains"]):
        count.add([number], len(word), parser.feed(word))

    assert count.total == 3


def test_an_answer_that_never_closes_its_reasoning_is_all_reasoning() -> None:
    assert counted(DeepSeekR1Parser(""), [b"Hm, ", b"Oslo"]) == 8


def test_an_answer_without_reasoning_has_none_although_it_begins_like_the_marker() -> None:
    assert counted(ThinkParser(""), [b"<th", b"is is no marker"]) == 0


def test_a_prompt_that_has_closed_the_reasoning_leaves_none() -> None:
    assert counted(ThinkParser("<think>\n\n</think>\n\n"), [b"Oslo", b" rains"]) == 0


# Over HTTP.


@pytest.fixture
def thinking(model: Any) -> Any:
    model.parsers = Parsers(tools=HermesParser, reasoning=ThinkParser)
    return model


async def usages(server: Any, **fields: Any) -> list[dict[str, Any]]:
    """Return the usage of a chat, streamed and whole."""
    reply = await server.chat(stream=True, stream_options={"include_usage": True}, **fields)
    return [reply.events[-2]["usage"], (await server.chat(**fields)).json()["usage"]]


async def test_chat_usage_has_reasoning_tokens(server: Any, thinking: Any) -> None:
    thinking.says(MARKED[:12], MARKED[12:] + ANSWER)

    for usage in await usages(server):
        assert usage["completion_tokens"] == len((MARKED + ANSWER).encode())
        assert usage["completion_tokens_details"] == {"reasoning_tokens": len(MARKED.encode())}


async def test_the_markup_of_a_call_is_no_reasoning(server: Any, thinking: Any) -> None:
    thinking.says(MARKED, CALL)

    for usage in await usages(server, tools=[TOOL]):
        assert usage["completion_tokens_details"] == {"reasoning_tokens": len(MARKED.encode())}


async def test_reasoning_tokens_of_several_choices_add_up(server: Any, thinking: Any) -> None:
    thinking.says(MARKED + ANSWER)

    for usage in await usages(server, n=3):
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 3 * len(MARKED.encode())}


async def test_continuous_usage_has_reasoning_tokens_so_far(server: Any, thinking: Any) -> None:
    thinking.says(*MARKED, ANSWER)

    reply = await server.chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})

    told = [event["usage"]["completion_tokens_details"]["reasoning_tokens"] for event in reply.events[:-1]]
    assert (told, told[-1]) == (sorted(told), len(MARKED.encode()))


async def test_a_model_without_a_parser_of_reasoning_is_silent(server: Any, model: Any) -> None:
    model.says(MARKED + ANSWER)

    assert not any("completion_tokens_details" in usage for usage in await usages(server))


async def test_responses_and_messages_report_reasoning_tokens(server: Any, thinking: Any) -> None:
    thinking.says(MARKED + ANSWER)

    response = (await server.post("/v1/responses", {"model": "m", "input": "Hi"})).json()
    message = (
        await server.post(
            "/v1/messages", {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "Hi"}]}
        )
    ).json()

    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": len(MARKED.encode())}
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": len(MARKED.encode())}


@pytest.mark.parametrize(("reported", "told"), [(4, 4), (40, 9), (None, None)])
async def test_an_engine_that_takes_text_reports_its_own(cold_server: Any, reported: int | None, told: Any) -> None:
    model = cold_server.add_model(model_input="text")
    own = CompletionUsage(prompt_tokens=3, completion_tokens=9, total_tokens=12, reasoning_tokens=reported)
    model.puts(
        LLMEngineOutput(delta={"reasoning_content": "Hm"}),
        LLMEngineOutput(text="Yes"),
        LLMEngineOutput(finish_reason=FinishReason.STOP, completion_usage=own),
    )
    await cold_server.start()

    for usage in await usages(cold_server):
        assert usage.get("completion_tokens_details") == (None if told is None else {"reasoning_tokens": told})
