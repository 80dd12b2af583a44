"""Reading the files of a model folder from a worker, piece by piece."""

from __future__ import annotations

import msgspec


class ModelFileRequest(msgspec.Struct, frozen=True):
    """The bare name of a file that the model's card lists."""

    name: str


class ModelFileChunk(msgspec.Struct, frozen=True, gc=False):
    """The next bytes of the file, in order, without gaps."""

    data: bytes
