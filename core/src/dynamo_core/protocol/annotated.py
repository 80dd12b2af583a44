"""`Annotated`: the wrapper of stream items other than plain data, and of the end-of-stream flag."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from dynamo_core.errors import DynamoError, Unknown, WireError, from_wire, to_wire

T = TypeVar("T")
U = TypeVar("U")

COMPLETE_FINAL = "complete_final"
ERROR = "error"


class Annotated(msgspec.Struct, Generic[T], omit_defaults=True):
    """A value with its annotations. An absent field is left out on the wire.

    `event` is ``error``, ``complete_final`` (the last item of a complete stream, always empty), or the name of an
    annotation whose value is in `comment`. `error` carries a typed error end to end.
    """

    data: T | None = None
    id: str | None = None
    event: str | None = None
    comment: list[str] | None = None
    error: WireError | None = None

    @classmethod
    def from_data(cls, data: T) -> Annotated[T]:
        """Return an item that is only data."""
        return cls(data=data)

    @classmethod
    def from_error(cls, error: str | BaseException) -> Annotated[T]:
        """Return an error item. An exception keeps its type and causes; a text loses them."""
        if isinstance(error, str):
            return cls(event=ERROR, comment=[error])
        return cls(event=ERROR, comment=[str(error)], error=to_wire(error))

    @classmethod
    def from_annotation(cls, name: str, value: Any) -> Annotated[T]:
        """Return a named annotation; the value travels as JSON text."""
        return cls(event=name, comment=[json.dumps(value, ensure_ascii=False)])

    @classmethod
    def from_complete_final(cls) -> Annotated[T]:
        """Return the flag that ends a complete stream: the event and nothing else."""
        return cls(event=COMPLETE_FINAL)

    def is_complete_final(self) -> bool:
        """Return whether this is the flag that ends a complete stream."""
        return self.event == COMPLETE_FINAL

    def is_error(self) -> bool:
        """Return whether this is an error item."""
        return self.event == ERROR

    def is_event(self) -> bool:
        """Return whether this is anything but plain data."""
        return self.event is not None

    def to_error(self) -> DynamoError:
        """Return the error in an error item: typed if the sender kept the type, else `Unknown` with the comments."""
        if self.error is not None:
            return from_wire(self.error)
        return Unknown(", ".join(self.comment) if self.comment else "unknown error")

    def ok(self) -> Annotated[T]:
        """Return the item itself; raise the error of an error item."""
        if self.is_error():
            raise self.to_error()
        return self

    def into_result(self) -> T | None:
        """Return the data, None if there is none; raise the error of an error item."""
        return self.ok().data

    def map_data(self, change: Callable[[T], U]) -> Annotated[U]:
        """Return the same item with its data changed. If `change` raises, an error item with that error."""
        if self.data is None:
            return self.transfer(None)
        try:
            data = change(self.data)
        except Exception as error:
            return Annotated.from_error(error)
        return self.transfer(data)

    def transfer(self, data: U | None) -> Annotated[U]:
        """Return an item with other data of which the same is said."""
        return Annotated(data, self.id, self.event, self.comment, self.error)
