"""Malformed bytes that every reader of another process's messages must survive."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

#: Lists or maps inside each other; more than any stack takes.
DEEP = 100_000
#: So deep that decoders still read it, and whatever compares or encodes it afterwards may not.
NEARLY = 450
LONG = 100_000

#: JSON texts of values, by what is wrong with them.
JSON_VALUES: Mapping[str, bytes] = {
    "lists inside each other": b"[" * DEEP + b"]" * DEEP,
    "lists that never end": b"[" * DEEP,
    "maps inside each other": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "maps that never end": b'{"a":' * DEEP,
    "lists just not too deep": b"[" * NEARLY + b"]" * NEARLY,
    "maps just not too deep": b'{"a":' * NEARLY + b"1" + b"}" * NEARLY,
    "an integer of many digits": b"9" * 5000,
    "an integer beyond 64 bits": str(2**64).encode(),
    "an integer below 64 bits": str(-(2**63) - 1).encode(),
    "the largest integer": str(2**64 - 1).encode(),
    "a negative integer": b"-1",
    "zero": b"0",
    "a number beyond floats": b"1e999",
    "the largest float": b"1.7976931348623157e308",
    "NaN": b"NaN",
    "infinity": b"-Infinity",
    "no UTF-8": b'"\xff\xfe"',
    "a name that is no UTF-8": b'{"\xff":1}',
    "half a pair of surrogates": b'"\\ud800"',
    "a name that is half a pair": b'{"\\udfff":1}',
    "a surrogate in UTF-8": b'"\xed\xa0\x80"',
    "control characters": b'"\\u001b[2J\\r\\n\\u0000"',
    "characters that turn the direction": '"\u202edetset\u2066"'.encode(),
    "a long text": b'"' + b"x" * LONG + b'"',
    "a long name": b'{"' + b"k" * LONG + b'":1}',
    "a name twice": b'{"a":1,"a":2}',
    "null": b"null",
    "true": b"true",
    "a text": b'"text"',
    "an empty text": b'""',
    "an empty list": b"[]",
    "an empty map": b"{}",
    "a list of nulls": b"[null,null]",
    "a float": b"0.5",
}

#: Whole bodies, by what is wrong with them.
JSON_BODIES: Mapping[str, bytes] = {
    **JSON_VALUES,
    "nothing": b"",
    "a blank": b" ",
    "a map that is cut off": b'{"name":',
    "a text that is cut off": b'"name',
    "a byte of zero": b"\x00",
    "a mark of the byte order": b"\xef\xbb\xbf{}",
    "another encoding": "{}".encode("utf-16"),
    "two values": b"{} {}",
}


def _ieee(number: float) -> bytes:
    return b"\xcb" + struct.pack(">d", number)


#: msgpack values, by what is wrong with them.
MSGPACK_VALUES: Mapping[str, bytes] = {
    "arrays inside each other": b"\x91" * DEEP + b"\x90",
    "maps inside each other": b"\x81\xa1a" * DEEP + b"\xc0",
    "keys inside each other": b"\x81" * DEEP,
    "keys that are arrays": b"\x81" + b"\x91" * NEARLY + b"\x90\xc0",
    "arrays just not too deep": b"\x91" * NEARLY + b"\x90",
    "maps just not too deep": b"\x81\xa1a" * NEARLY + b"\xc0",
    "an array of 2^32": b"\xdd\xff\xff\xff\xff",
    "a map of 2^32": b"\xdf\xff\xff\xff\xff",
    "a text of 2^32": b"\xdb\xff\xff\xff\xff",
    "bytes of 2^32": b"\xc6\xff\xff\xff\xff",
    "an extension of 2^32": b"\xc9\xff\xff\xff\xff\x01",
    "the largest integer": b"\xcf" + b"\xff" * 8,
    "the lowest integer": b"\xd3\x80" + bytes(7),
    "a negative integer": b"\xff",
    "zero": b"\x00",
    "NaN": _ieee(float("nan")),
    "infinity": _ieee(float("-inf")),
    "the largest float": _ieee(1.7976931348623157e308),
    "no UTF-8": b"\xa2\xff\xfe",
    "a surrogate in UTF-8": b"\xa3\xed\xa0\x80",
    "control characters": b"\xa5\x1b[2J\n",
    "a long text": b"\xdb" + struct.pack(">I", LONG) + b"x" * LONG,
    "a long name": b"\x81\xdb" + struct.pack(">I", LONG) + b"k" * LONG + b"\x01",
    "a name twice": b"\x82\xa1a\x01\xa1a\x02",
    "a time that is none": b"\xd7\xff" + b"\xff" * 8,
    "an unknown extension": b"\xc7\x01\x05\x00",
    "null": b"\xc0",
    "true": b"\xc3",
    "an empty text": b"\xa0",
    "an empty array": b"\x90",
    "an empty map": b"\x80",
    "an array of nulls": b"\x92\xc0\xc0",
    "bytes": b"\xc4\x01\x00",
}

MSGPACK_BODIES: Mapping[str, bytes] = {
    **MSGPACK_VALUES,
    "nothing": b"",
    "a byte that begins nothing": b"\xc1",
    "an array that is cut off": b"\x93\x01",
    "a text that is cut off": b"\xa5ab",
    "JSON": b'{"a": 1}',
}


def plain_bodies(*good: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield bad bodies alone."""
    yield from JSON_BODIES.items()


def json_bodies(*good: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield bad bodies, and good ones in which one value after the other is replaced by a bad one."""
    yield from JSON_BODIES.items()
    for one in good:
        yield "a good one that is cut off", one[:-1]
        raw = msgspec.json.Decoder()
        for what, value in JSON_VALUES.items():
            for path, body in _replaced(raw.decode(one), msgspec.Raw(value)):
                yield f"{what} as {path}", msgspec.json.encode(body)


def msgpack_bodies(*good: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the same for msgpack."""
    yield from MSGPACK_BODIES.items()
    for one in good:
        yield "a good one that is cut off", one[:-1]
        for what, value in MSGPACK_VALUES.items():
            for path, body in _replaced(msgspec.msgpack.decode(one), msgspec.Raw(value)):
                yield f"{what} as {path}", msgspec.msgpack.encode(body)


def _replaced(value: Any, bad: msgspec.Raw, path: str = "$") -> Iterator[tuple[str, Any]]:
    """Yield copies of a value in which one part is another; a map has a part more."""
    if isinstance(value, Mapping):
        for name, child in value.items():
            yield f"{path}.{name}", {**value, name: bad}
            for where, other in _replaced(child, bad, f"{path}.{name}"):
                yield where, {**value, name: other}
        yield f"{path}.unknown", {**value, "unknown": bad}
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for index, child in enumerate(value):
            yield f"{path}[{index}]", [*value[:index], bad, *value[index + 1 :]]
            for where, other in _replaced(child, bad, f"{path}[{index}]"):
                yield where, [*value[:index], other, *value[index + 1 :]]
