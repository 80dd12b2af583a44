"""Server-sent events, however the network cuts them."""

from __future__ import annotations

import pytest
from dynamo_core import BackendError
from dynamo_plugin_engine_upstream import sse
from dynamo_plugin_engine_upstream.sse import EventDecoder
from hypothesis import given
from hypothesis import strategies as st

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1)


@given(st.lists(TEXT), st.sampled_from(["\n", "\r\n", "\r"]), st.lists(st.integers(1, 40), min_size=1))
def test_any_cut_of_a_stream_decodes_the_same_events(texts: list[str], end: str, cuts: list[int]) -> None:
    stream = "".join(f": a comment{end}event: message{end}data: {text}{end}{end}" for text in texts).encode()
    reader, found, at = EventDecoder(), [], 0
    while at < len(stream):
        size = cuts[at % len(cuts)]
        found += reader.feed(stream[at : at + size])
        at += size

    assert [data.decode() for data in found + reader.end()] == texts


def test_lines_of_one_event_are_joined_and_a_blank_after_the_colon_is_optional() -> None:
    assert EventDecoder().feed(b"data:a\ndata: b\n\n") == [b"a\nb"]


def test_an_event_that_only_the_end_ended_counts() -> None:
    reader = EventDecoder()

    assert reader.feed(b"data: [DONE]") == []
    assert reader.end() == [sse.DONE]


def test_a_stream_without_line_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "LARGEST", 100)
    reader = EventDecoder()
    reader.feed(b"data: " + b"x" * 90)

    with pytest.raises(BackendError.StreamIncomplete, match="more than 100 bytes"):
        reader.feed(b"y" * 10)
