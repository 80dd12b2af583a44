"""Decoding of large JSON texts in pieces.

One call of the decoder keeps the interpreter's lock until it returns: the event loop stands still for 50 to 120 ms
while it makes 44 MB of one text, or a million numbers. So long texts and long runs of numbers are cut out of a body and
decoded a piece at a time, with a pause after each. The small body that is left names them.
"""

from __future__ import annotations

import ctypes
import secrets
import time
from typing import Any

import msgspec
from dynamo_core.errors import InvalidArgument

from dynamo_generation.bodies.bounds import MAX_VALUES

#: Bytes that are looked at and decoded at once, which takes about a millisecond; an even number.
_SLICE = 128 * 1024
#: Values that are freed at once.
_STEP = 32 * 1024
#: Seconds of each pause, in which the event loop can take the interpreter's lock.
_PAUSE = 0.0005
#: Bytes at the end of a piece of text in which an escape may have begun.
_ESCAPE = 12

_BRACKETS = (b"[", b"]", b"{", b"}")
_BACKSLASH = ord("\\")
_HIGH_SURROGATES = (b"\\ud8", b"\\ud9", b"\\uda", b"\\udb")
#: What C has for making a text in steps. The text may have one reference only, so that it goes by its address.
_new_text = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_ssize_t, ctypes.c_uint32)(("PyUnicode_New", ctypes.pythonapi))
_copy_characters = ctypes.PYFUNCTYPE(
    ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_ssize_t
)(("PyUnicode_CopyCharacters", ctypes.pythonapi))
_texts = msgspec.json.Decoder(str)
_numbers = msgspec.json.Decoder(list[Any])


class Pieces:
    """The long texts and runs of numbers of one body."""

    def __init__(self) -> None:
        #: How the texts begin that stand for others. No client can know it.
        self._mark = secrets.token_hex(16)
        self._cut: list[_LongText | list[Any]] = []
        self._text: _LongText | None = None
        self._values = 0
        self._left: list[bytes] = []

    def cut(self, body: bytes) -> bytes:
        """Return the body without them.

        Raises:
            msgspec.DecodeError, UnicodeDecodeError: a piece is not JSON.
            InvalidArgument: there are too many numbers.
        """
        self._scan(body)
        left = b"".join(self._left)
        self._left.clear()
        if self._values > MAX_VALUES:
            self._refuse(left)
        return left

    def restore(self, value: dict[str, Any]) -> None:
        """Put the cut values back into the object that the rest of the body was.

        Raises:
            InvalidArgument: the name of a field was cut out.
        """
        waiting: list[Any] = [value] if self._cut else []
        while waiting:
            item = waiting.pop()
            if isinstance(item, list):
                waiting += self._restore_list(item)
                continue
            for name, one in item.items():
                if name.startswith(self._mark):
                    raise InvalidArgument("Validation: The name of a field is too long")
                if isinstance(one, str):
                    item[name] = self._whole(one)
                elif isinstance(one, dict | list):
                    waiting.append(one)

    def _restore_list(self, item: list[Any]) -> list[Any]:
        """Put back the values of a list; gives the lists and objects in it, of which none was cut out."""
        inner = [one for one in item if isinstance(one, dict | list)]
        if not any(isinstance(one, str) and one.startswith(self._mark) for one in item):
            return inner
        marks = item[:]
        item.clear()
        for one in marks:
            found = self._whole(one) if isinstance(one, str) else one
            if isinstance(one, str) and isinstance(found, list):
                item += found
                found.clear()
            else:
                item.append(found)
        return inner

    def _whole(self, text: str) -> Any:
        """Return the value that a text stands for, which is given once; most stand for themselves."""
        if not text.startswith(self._mark):
            return text
        time.sleep(_PAUSE)
        found = self._cut[int(text[len(self._mark) :])]
        return found.whole() if isinstance(found, _LongText) else found

    def _scan(self, body: bytes) -> None:
        start, inside, begun = 0, False, b""
        while start < len(body):
            piece = body[start : start + _SLICE]
            if len(piece) == _SLICE and piece[-1] == _BACKSLASH and _ends_in_escape(piece):
                piece = piece[:-1]
            start += len(piece)
            # With escapes made invisible, each quote opens or closes a text.
            plain = piece.replace(b"\\\\", b"..").replace(b'\\"', b"..") if b"\\" in piece else piece
            quotes = plain.count(b'"')
            if not quotes and inside:
                if self._text is None:
                    self._text = _LongText(begun)
                    self._put(self._text)
                    begun = b""
                self._text.feed(piece)
            elif not quotes:
                self._outside(piece)
            else:
                first, last = plain.find(b'"'), plain.rfind(b'"')
                self._close(begun, piece[:first])
                inside ^= bool(quotes % 2)
                self._left.append(piece[first : last + 1] if inside else piece[first:])
                begun = piece[last + 1 :] if inside else b""
            time.sleep(_PAUSE)
        self._close(begun, b"")

    def _close(self, begun: bytes, rest: bytes) -> None:
        """End a text, long or not, or what stands before the first quote."""
        if self._text is None:
            self._left += (begun, rest)
        else:
            self._text.feed(rest)
            self._text.end()
            self._text = None

    def _outside(self, piece: bytes) -> None:
        """Cut out numbers from comma to comma; what else stands outside of texts is left as it is."""
        if piece.isspace():
            self._left.append(b" ")
            return
        first, last = piece.find(b","), piece.rfind(b",")
        if first == last or any(bracket in piece for bracket in _BRACKETS):
            self._left.append(piece)
            return
        numbers = piece[first + 1 : last]
        if numbers.isspace():
            # No JSON, which the decoder says.
            self._left.append(piece)
            return
        self._values += piece.count(b",")
        self._left.append(piece[: first + 1])
        # Beyond the bound nothing is made any more; the field with the most is named when all are counted.
        self._put(_numbers.decode(b"[%b]" % numbers) if self._values <= MAX_VALUES else [], quoted=True)
        self._left.append(piece[last:])

    def _put(self, value: _LongText | list[Any], *, quoted: bool = False) -> None:
        mark = f"{self._mark}{len(self._cut)}"
        self._left.append((f'"{mark}"' if quoted else mark).encode())
        self._cut.append(value)

    def _refuse(self, body: bytes) -> None:
        mark = self._mark.encode()
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        field = max(fields, key=lambda name: bytes(fields[name]).count(mark))
        raise InvalidArgument(f"Validation: {field} has too many values: at most {MAX_VALUES} are allowed", field=field)


class _LongText:
    """A text that comes in pieces of JSON, without its quotes."""

    def __init__(self, begun: bytes) -> None:
        self._parts: list[str] = []
        self._rest = begun

    def feed(self, piece: bytes) -> None:
        """Decode some more of it, up to where no character is cut."""
        data = self._rest + piece
        end = _boundary(data)
        self._parts.append(_texts.decode(b'"%b"' % data[:end]))
        self._rest = data[end:]

    def end(self) -> None:
        """Decode the rest."""
        self._parts.append(_texts.decode(b'"%b"' % self._rest))

    def whole(self) -> str:
        """Return the text. The parts are let go."""
        parts, self._parts = self._parts, []
        return _joined(parts)


def _joined(parts: list[str]) -> str:
    """Join texts a part at a time, and let each go.

    `str.join` keeps the interpreter's lock while all of the memory is touched for the first time.
    """
    text: str = _new_text(sum(map(len, parts)), max(map(_widest, parts), default=0))
    at = 0
    parts.reverse()
    while parts:
        part = parts.pop()
        at += _copy_characters(id(text), at, id(part), 0, len(part))
        time.sleep(_PAUSE)
    return text


def _widest(part: str) -> int:
    """Return the largest character of a text, or another that takes as many bytes in memory."""
    if part.isascii():
        return 0x7F
    if len(part.encode("utf-16-le", "surrogatepass")) > 2 * len(part):
        return 0x10FFFF
    try:
        part.encode("latin-1")
    except UnicodeEncodeError:
        return 0xFFFF
    return 0xFF


def _boundary(data: bytes) -> int:
    """Return where a text that is cut there is cut in no escape, no pair of surrogates, and no character."""
    end = len(data)
    at = data.rfind(b"\\", max(0, end - _ESCAPE))
    if at < 0:
        for start in range(end - 1, max(end - 5, 0), -1):
            if data[start] & 0xC0 != 0x80:
                return start if data[start] >= 0xC0 else end
        return end
    if not _ends_in_escape(data[: at + 1]):
        # Two of them are one character.
        return at + 1
    pair = at - 6
    if pair >= 0 and data[pair : pair + 4].lower() in _HIGH_SURROGATES and _ends_in_escape(data[: pair + 1]):
        return pair
    return at


def _ends_in_escape(data: bytes) -> bool:
    """Return whether the last backslash of a text, with which it ends, begins an escape."""
    return (len(data) - len(data.rstrip(b"\\"))) % 2 == 1


def is_long(value: object) -> bool:
    """Return whether a value is a list so long that work on all of it is done in steps."""
    return isinstance(value, list) and len(value) > _STEP


def copied(values: list[Any]) -> list[Any]:
    """Copy a long list a piece at a time."""
    made: list[Any] = []
    for start in range(0, len(values), _STEP):
        made += values[start : start + _STEP]
        time.sleep(_PAUSE)
    return made


def free(raw: dict[str, Any]) -> None:
    """Empty the lists of an object a piece at a time: a million numbers at once hold the interpreter's lock."""
    for value in raw.values():
        while isinstance(value, list) and value:
            del value[-_STEP:]
            time.sleep(_PAUSE)
    raw.clear()
