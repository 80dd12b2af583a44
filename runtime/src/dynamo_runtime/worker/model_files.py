"""Serving the files of the model folder, by name, in pieces."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Mapping

from dynamo_core.contracts.engine import WorkerConfig
from dynamo_core.contracts.model_folder import CHAT_TEMPLATE, TOOL_TEMPLATE, load_folder, load_template
from dynamo_core.contracts.transports.call import ServedContext
from dynamo_core.errors import InvalidArgument
from dynamo_core.protocol.records import ModelFile, ModelFileChunk, ModelFileRequest

#: Bytes per piece.
PIECE = 256 * 1024


def read_files(config: WorkerConfig) -> dict[str, bytes]:
    """Return the files that a worker's model consists of, by bare name; a template of its own takes the folder's place.

    Raises:
        ConfigError: the folder or the template cannot be used.
    """
    files = load_folder(config.model_path) if config.model_path is not None else {}
    if config.custom_jinja_template is not None:
        files[CHAT_TEMPLATE] = load_template(config.custom_jinja_template)
        files.pop(TOOL_TEMPLATE, None)
    return files


class ModelFiles:
    """The files that the card lists, held in memory: they were read once to make the checksums."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = dict(files)

    def listing(self) -> list[ModelFile]:
        """Name, size and SHA-256 of each file, by name."""
        return [
            ModelFile(name, len(data), hashlib.sha256(data).hexdigest()) for name, data in sorted(self._files.items())
        ]

    async def serve(self, request: ModelFileRequest, ctx: ServedContext) -> AsyncGenerator[ModelFileChunk, None]:
        """Return the handler of ``model_file``."""
        data = self._files.get(request.name)
        if data is None:
            raise InvalidArgument(f"there is no model file {request.name!r}")
        return self._pieces(data)

    @staticmethod
    async def _pieces(data: bytes) -> AsyncGenerator[ModelFileChunk, None]:
        for at in range(0, len(data), PIECE):
            yield ModelFileChunk(data[at : at + PIECE])
