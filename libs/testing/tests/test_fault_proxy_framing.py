"""Without faults bytes pass as they came, however they are cut into pieces."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from dynamo_testing.faults import FaultProxy, Framing, FramingError, LengthPrefixed, Raw
from hypothesis import given, settings
from hypothesis import strategies as st

FRAMINGS = [LengthPrefixed(), LengthPrefixed(head=2, byteorder="little"), Raw()]

bodies = st.lists(st.binary(max_size=300), max_size=8)


def framed(body: bytes, framing: Framing) -> bytes:
    if isinstance(framing, LengthPrefixed):
        return len(body).to_bytes(framing.head, framing.byteorder) + body
    return body


@st.composite
def pieces(draw: st.DrawFn, framing: Framing) -> list[bytes]:
    """Return frames, perhaps one that is cut short, in pieces of any size."""
    data = b"".join(framed(body, framing) for body in draw(bodies))
    data = data[: len(data) - draw(st.integers(0, min(len(data), 20)))]
    cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=12)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@pytest.mark.parametrize("framing", FRAMINGS, ids=str)
@given(data=st.data())
def test_frames_and_rest_join_to_the_input(framing: Framing, data: st.DataObject) -> None:
    splitter = framing.splitter()
    came = data.draw(pieces(framing))

    frames = [frame for piece in came for frame in splitter.feed(piece)]

    assert b"".join(frame.data for frame in frames) + splitter.rest() == b"".join(came)


@pytest.mark.parametrize("framing", FRAMINGS[:2], ids=str)
@given(data=st.data())
def test_every_whole_body_is_a_frame(framing: Framing, data: st.DataObject) -> None:
    sent = data.draw(bodies)
    whole = b"".join(framed(body, framing) for body in sent)
    size = data.draw(st.integers(1, 50))
    splitter = framing.splitter()

    frames = [frame for start in range(0, len(whole), size) for frame in splitter.feed(whole[start : start + size])]

    assert [frame.body for frame in frames] == sent
    assert splitter.rest() == b""


def test_a_body_over_the_limit_is_refused_before_it_is_kept() -> None:
    splitter = LengthPrefixed(limit=10).splitter()

    assert [frame.body for frame in splitter.feed(b"\0\0\0\x0a" + bytes(10))] == [bytes(10)]
    with pytest.raises(FramingError, match="11 bytes"):
        list(splitter.feed(b"\0\0\0\x0b"))


@pytest.mark.parametrize("framing", FRAMINGS, ids=str)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_bytes_pass_unchanged_in_both_directions(framing: Framing, data: st.DataObject) -> None:
    up, down = data.draw(pieces(framing)), data.draw(pieces(framing))

    heard = asyncio.run(through_a_proxy(framing, up, down))

    assert heard == (b"".join(up), b"".join(down))


async def through_a_proxy(framing: Framing, up: list[bytes], down: list[bytes]) -> tuple[bytes, bytes]:
    """Send pieces to a server and back at the same time; what arrived there, and here."""
    heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering = asyncio.ensure_future(send(writer, down))
        heard.set_result(await reader.read())
        await answering
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with asyncio.timeout(10):
        async with FaultProxy("127.0.0.1", server.sockets[0].getsockname()[1], framing=framing) as proxy:
            reader, writer = await asyncio.open_connection(proxy.host, proxy.port)
            asking = asyncio.ensure_future(send(writer, up))
            answer = await reader.read()
            await asking
            result = await heard, answer
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        server.close()
        await server.wait_closed()
    return result


async def send(writer: asyncio.StreamWriter, pieces: list[bytes]) -> None:
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0)
    writer.write_eof()
