"""A decoder of lines in a byte stream."""

from __future__ import annotations

#: The longest line, in bytes.
MAX_LINE = 64 * 1024 * 1024


class LineDecoder:
    """Joins the chunks of a stream and splits them into lines."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are complete with `data`, without their ends; empty ones are left out.

        Raises:
            ValueError: a line is longer than `MAX_LINE`.
        """
        self._rest += data
        # Only what is new can hold the end of a line.
        if b"\n" not in data:
            if len(self._rest) > MAX_LINE:
                raise ValueError(f"a message of more than {MAX_LINE} bytes")
            return []
        *lines, rest = self._rest.split(b"\n")
        self._rest = rest
        return [bytes(line) for line in lines if line.strip()]
