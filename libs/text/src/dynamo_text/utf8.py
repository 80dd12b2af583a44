"""Incremental UTF-8: text cut within characters, and text that cannot be encoded."""

from __future__ import annotations

from codecs import utf_8_decode

from dynamo_core.errors import InvalidArgument


def to_utf8(text: str, at: int = 0) -> bytes:
    """Return the UTF-8 bytes of a text, which begins at character `at` of another one.

    Raises:
        InvalidArgument: the text holds a lone surrogate, which JSON can spell but no encoding can carry.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        where = f"lone surrogate U+{ord(text[error.start]):04X} at character {at + error.start}"
        raise InvalidArgument(f"the text is not valid Unicode: {where}", cause=error) from error


class Utf8Stream:
    """Decodes bytes as they come. What cannot be decoded becomes U+FFFD, as ``bytes.decode(errors="replace")`` does."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> str:
        """Return all whole characters so far; the bytes of an incomplete one wait."""
        rest = self._rest
        if rest:
            data = rest + data
        text, used = utf_8_decode(data, "replace", False)
        if used != len(data):
            self._rest = data[used:]
        elif rest:
            self._rest = b""
        return text

    def flush(self) -> str:
        """Return the incomplete character at the end, as U+FFFD."""
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")
