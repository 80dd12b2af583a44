"""Fetching the files of a model from one of its workers, checked against the card."""

from __future__ import annotations

import asyncio
import hashlib
import re

from dynamo_core.contracts.transports.call import MODEL_FILE
from dynamo_core.errors import ResponseTimeout, StreamIncomplete, Unavailable
from dynamo_core.protocol.records import Instance, ModelCard, ModelFile, ModelFileChunk, ModelFileRequest

from dynamo_runtime.dispatch.execution.endpoint_caller import Caller
from dynamo_runtime.dispatch.models.cache import ModelCache

#: The largest file and the largest sum of files a card may list, in bytes.
MAX_FILE = 256 * 1024 * 1024
MAX_TOTAL = 512 * 1024 * 1024
#: How many files a card may list, and the longest name of one, in characters.
MAX_FILES = 64
MAX_NAME = 200
#: Seconds for one file, and for all files of a card.
TIMEOUT = 60.0
TOTAL_TIMEOUT = 180.0

_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_listing(card: ModelCard) -> None:
    """Refuse a card whose list of files is not plausible, before anything is fetched.

    Raises:
        Unavailable: too many files, too large, named twice, a name that is not a bare file name, or a checksum that
            is none.
    """
    if len(card.files) > MAX_FILES:
        raise Unavailable(f"the card of {card.name!r} lists {len(card.files)} files, more than {MAX_FILES}")
    for file in card.files:
        if not _is_bare_name(file.name):
            raise Unavailable(f"the card of {card.name!r} lists a file with a bad name: {file.name[:MAX_NAME]!r}")
        if not 0 <= file.size <= MAX_FILE:
            raise Unavailable(f"the card of {card.name!r} lists {file.name!r} with {file.size} bytes")
        if not _SHA256.fullmatch(file.sha256):
            raise Unavailable(f"the card of {card.name!r} lists {file.name!r} with a checksum that is no SHA-256")
    if len({file.name for file in card.files}) < len(card.files):
        raise Unavailable(f"the card of {card.name!r} lists a file twice")
    if sum(file.size for file in card.files) > MAX_TOTAL:
        raise Unavailable(f"the card of {card.name!r} lists more than {MAX_TOTAL} bytes of files")


async def fetch_files(
    card: ModelCard, instance: Instance, call: Caller, cache: ModelCache | None = None
) -> dict[str, bytes]:
    """Return all files that the card lists, by name: from the cache if they are there, else from the worker.

    Raises:
        DynamoError: the worker could not be asked, or what it gave is not what the card says.
    """
    check_listing(card)
    try:
        async with asyncio.timeout(TOTAL_TIMEOUT):
            return {file.name: await _get(file, instance, call, cache) for file in card.files}
    except TimeoutError as error:
        raise ResponseTimeout(
            f"the files of {card.name!r} from worker {instance.instance_id:016x} took longer than {TOTAL_TIMEOUT} s",
            cause=error,
        ) from error


async def _get(file: ModelFile, instance: Instance, call: Caller, cache: ModelCache | None) -> bytes:
    if cache is None:
        return await _fetch(file, instance, call)
    data = await asyncio.to_thread(cache.get, file)
    if data is None:
        data = await _fetch(file, instance, call)
        await asyncio.to_thread(cache.put, file, data)
    return data


async def _fetch(file: ModelFile, instance: Instance, call: Caller) -> bytes:
    arriving = _IncomingFile(file, instance)
    await call.each(instance, MODEL_FILE, ModelFileRequest(file.name), arriving.take, timeout=TIMEOUT)
    return arriving.finish()


class _IncomingFile:
    """A file that comes in pieces: never more is held than its card says."""

    def __init__(self, file: ModelFile, instance: Instance) -> None:
        self._file = file
        self._instance = instance
        self._pieces: list[bytes] = []
        self._size = 0
        # Piece by piece as it comes: hashing a large file at once would hold up the loop.
        self._hash = hashlib.sha256()

    def take(self, chunk: object) -> None:
        """Add a piece. An error raised here ends the call."""
        # Empty pieces could come for ever without adding up; only an empty file may come as one.
        if not isinstance(chunk, ModelFileChunk) or (not chunk.data and self._file.size):
            raise self._wrong()
        self._size += len(chunk.data)
        if self._size > self._file.size:
            raise self._wrong()
        if chunk.data:
            self._pieces.append(chunk.data)
        self._hash.update(chunk.data)

    def finish(self) -> bytes:
        """Return the whole file, if it is what the card says."""
        if self._size != self._file.size or self._hash.hexdigest() != self._file.sha256:
            raise self._wrong()
        return b"".join(self._pieces)

    def _wrong(self) -> StreamIncomplete:
        return StreamIncomplete(
            f"file {self._file.name!r} from worker {self._instance.instance_id:016x} is not what its card says"
        )


def _is_bare_name(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME and not name.startswith(".") and not any(sign in name for sign in "/\\\0")
