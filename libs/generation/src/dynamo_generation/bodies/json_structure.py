"""The structure of an unparsed JSON text: the characters outside of strings, and the outermost names.

The scan is one pass that never goes back. Each call into C, which keeps the interpreter's lock, looks at one piece.
"""

from __future__ import annotations

from collections.abc import Iterator

#: Bytes of a piece.
PIECE = 256 * 1024
#: Bytes of a piece that is looked at for names, which takes longer.
NAMED_PIECE = 16 * 1024

_OPENING = frozenset(b"[{")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def outside_of_strings(text: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield for each piece its end, the number of quotes in it, and its bytes outside of strings."""
    inside, rest = 0, b""
    for start in range(0, len(text), PIECE):
        plain = rest + text[start : start + PIECE]
        if b"\\" in plain:
            plain = plain.replace(b"\\\\", b"").replace(b'\\"', b"")
        # What a last backslash escapes comes with the next piece.
        rest = plain[-1:] if plain.endswith(b"\\") else b""
        parts = plain.split(b'"')
        yield min(start + PIECE, len(text)), len(parts) - 1, b"".join(parts[inside::2])
        inside = (inside + len(parts) - 1) % 2


def depths(outside: bytes, depth: int) -> Iterator[int]:
    """Yield the depth after each bracket of bytes outside of strings, beginning at `depth`."""
    for bracket in outside.translate(None, _NOT_BRACKETS):
        depth += 1 if bracket in _OPENING else -1
        yield depth


def outermost_names(text: bytes, deepest: int, most_texts: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield each name of the outermost object, as JSON, after the position of its end.

    The scan ends early where the text is no JSON, or has more than `deepest` lists and objects inside each other.

    Raises:
        OverflowError: the outermost object has more than about `most_texts` texts.
    """
    position = depth = begin = end = looked_at = 0
    inside, rest = False, b""
    for start in range(0, len(text), NAMED_PIECE):
        piece = rest + text[start : start + NAMED_PIECE]
        # Of the same length, so that positions stay what they are.
        masked = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        rest = masked[-1:] if masked.endswith(b"\\") else b""
        parts = (masked[:-1] if rest else masked).split(b'"')
        if depth > 1:
            found = list(depths(b"".join(parts[inside::2]), depth)) or [depth]
            if min(found) > 1 and max(found) <= deepest:
                # A piece of a value: it has no outermost names, however many texts.
                position += len(masked) - len(rest)
                inside, depth = (inside + len(parts) - 1) % 2 == 1, found[-1]
                begin, end = position - len(parts[-1]) - 1 if len(parts) > 1 else begin, 0
                continue
        looked_at += len(parts) // 2
        if most_texts is not None and looked_at > most_texts:
            raise OverflowError("the outermost object has too many texts")
        for index, part in enumerate(parts):
            if index:
                inside = not inside
                position += 1
                begin, end = (position - 1, 0) if inside else (begin, position)
            position += len(part)
            if inside or not (part := part.lstrip()):
                continue
            if end and depth == 1 and part.startswith(b":"):
                yield end, text[begin:end]
            end = 0
            for depth in depths(part, depth):  # noqa: B020 - the depth is carried on
                if not 0 <= depth <= deepest:
                    return
