"""No decoder of core or a plugin raises an undocumented error on bytes of another process."""

from __future__ import annotations

import inspect
import logging

import pytest

from tests.architecture.decoding_sites import sites, sites_of
from tests.architecture.readers import READERS, TRUSTED, Feed

#: Warnings that one reader may give of one name after the other, and characters of one.
WARNINGS, LONGEST = 100, 5000


def test_every_place_that_decodes_is_fed_or_trusted() -> None:
    covered = [site for one in READERS.values() for site in one.sites] + list(TRUSTED)

    assert sorted(sites()) == sorted(covered), "put the new decoder among the readers of tests/architecture/readers.py"


def test_a_new_decoder_would_be_found_however_it_is_written() -> None:
    source = """
import json, msgspec
from json import loads as read
from msgspec import msgpack
_one: msgspec.json.Decoder[int] = msgspec.json.Decoder(int)
class A:
    other = staticmethod(json.loads)
    async def f(self, decoder: msgpack.Decoder[int]) -> None:
        read(""), msgpack.decode(b""), read(""), await response.json()
"""

    assert sites_of(source, "m") == [
        "m:_one msgspec.json.Decoder",
        "m:A json.loads",
        "m:A.f json.loads",
        "m:A.f msgspec.msgpack.decode",
        "m:A.f json.loads #2",
        "m:A.f .json",
    ]


@pytest.mark.parametrize("name", READERS)
async def test_bad_bytes_are_refused_as_foreseen_and_good_ones_still_count(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = READERS[name]
    surprises: list[str] = []

    async def meet(feed: Feed, what: str, data: bytes) -> None:
        try:
            done = feed(data)
            if inspect.isawaitable(done):
                await done
        except one.raises as error:
            if len(str(error)) > LONGEST:
                surprises.append(f"{what}: a text of {len(str(error))} characters")
        except Exception as error:
            surprises.append(f"{what}: {type(error).__name__}: {str(error)[:100]}")

    with caplog.at_level(logging.WARNING):
        async with one.open() as feed:
            for what, data in one.bodies(*one.good):
                await meet(feed, what, data)
            for data in one.good:
                done = feed(data)
                if inspect.isawaitable(done):
                    await done

    assert surprises == []
    assert [record.getMessage()[:200] for record in caplog.records if record.exc_info] == []
    assert len(caplog.records) <= WARNINGS
    assert all(len(record.getMessage()) <= LONGEST for record in caplog.records)
    assert all(record.getMessage().isprintable() for record in caplog.records)
