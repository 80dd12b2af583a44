"""What another process wrote: every fault of it is one error with a short text, and warnings about it stay few."""

from __future__ import annotations

import logging

import msgspec
import pytest
from dynamo_core.protocol.decoding import MAX_DEPTH, SHOWN, Unreadable, check_depth, read, read_json, truncated
from dynamo_core.protocol.unreadable_warnings import BURST, EVERY, UnreadableWarner
from hypothesis import given
from hypothesis import strategies as st

ANY = msgspec.json.Decoder()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("data", [b"[" * 100_000, b"\xff", b"", b'"\\ud800"', b"9" * 10_000, b"{"])
def test_any_malformed_msgpack_is_unreadable(data: bytes) -> None:
    with pytest.raises(Unreadable):
        read(ANY, data)


@pytest.mark.parametrize("data", [b"[" * 100_000, b"\xff", b"", b"9" * 10_000, "[" * 100_000])
def test_any_malformed_json_is_unreadable(data: bytes | str) -> None:
    with pytest.raises(Unreadable):
        read_json(data)


def test_an_error_holds_no_more_of_a_foreign_text_than_a_line_can() -> None:
    class Kinds(msgspec.Struct, tag="a"):
        pass

    with pytest.raises(Unreadable) as caught:
        read(msgspec.json.Decoder(Kinds), msgspec.json.encode({"type": "\u202e\n" * 50_000}))

    assert len(str(caught.value)) < 10 * SHOWN
    assert str(caught.value).isprintable()


@given(st.text())
def test_truncated_text_is_printable_and_short(text: str) -> None:
    seen = truncated(text, 20)

    assert seen.isprintable()
    assert len(seen) <= 21 * len("\\U00000000")
    assert seen == text or len(text) > 20 or not text.isprintable()


def test_too_deep_nesting_is_unreadable() -> None:
    value: object = 1
    for _ in range(MAX_DEPTH):
        value = {"a": [value][0]}
    check_depth(value)

    with pytest.raises(Unreadable, match="inside each other"):
        check_depth([value])


def test_each_unreadable_name_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    left_out = UnreadableWarner(logging.getLogger("dynamo"), "record", Clock())
    for _ in range(3):
        left_out.warn("a", "no")
    left_out.readable("a")
    left_out.warn("a", "no")

    assert [record.getMessage() for record in caplog.records] == ["record 'a' cannot be read and is left out: no"] * 2


def test_many_unreadable_names_are_summed_in_few_warnings(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    left_out = UnreadableWarner(logging.getLogger("dynamo"), "record", clock)
    for number in range(100_000):
        left_out.warn(f"key {number}", "no")
    assert len(caplog.records) == BURST

    clock.now += EVERY
    left_out.warn("the last", "no")

    assert len(caplog.records) == BURST + 1
    assert f"{100_000 - BURST} more" in caplog.records[-1].getMessage()


def test_a_warning_shows_names_and_reasons_on_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    UnreadableWarner(logging.getLogger("dynamo"), "record").warn("\x1b[2J\u202e" * 60_000, "\n" * 60_000)

    message = caplog.records[0].getMessage()
    assert message.isprintable()
    assert len(message) < 5000
