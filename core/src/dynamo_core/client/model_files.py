"""Fetching the files of a model from one of its workers, checked against the card."""

from __future__ import annotations

import hashlib

from dynamo_core.client.caller import Caller
from dynamo_core.contracts.endpoints import MODEL_FILE
from dynamo_core.errors import StreamIncomplete, Unavailable
from dynamo_core.protocol.files import ModelFileChunk, ModelFileRequest
from dynamo_core.protocol.records import Instance, ModelCard, ModelFile

#: The largest file and the largest sum of files a card may list, in bytes.
MAX_FILE = 256 * 1024 * 1024
MAX_TOTAL = 512 * 1024 * 1024
#: How many files a card may list.
MAX_FILES = 64
#: Seconds for one file.
TIMEOUT = 60.0


def check_listing(card: ModelCard) -> None:
    """Refuses a card whose list of files is not plausible, before anything is fetched.

    Raises:
        Unavailable: too many files, too large, or a name that is not a bare file name.
    """
    if len(card.files) > MAX_FILES:
        raise Unavailable(f"the card of {card.name!r} lists {len(card.files)} files, more than {MAX_FILES}")
    for file in card.files:
        if not file.name or file.name.startswith(".") or any(sign in file.name for sign in ("/", "\\", "\0")):
            raise Unavailable(f"the card of {card.name!r} lists a file with a bad name: {file.name!r}")
        if not 0 <= file.size <= MAX_FILE:
            raise Unavailable(f"the card of {card.name!r} lists {file.name!r} with {file.size} bytes")
    if sum(file.size for file in card.files) > MAX_TOTAL:
        raise Unavailable(f"the card of {card.name!r} lists more than {MAX_TOTAL} bytes of files")


async def fetch_files(card: ModelCard, instance: Instance, call: Caller) -> dict[str, bytes]:
    """All files that the card lists, by name.

    Raises:
        DynamoError: the worker could not be asked, or what it gave is not what the card says.
    """
    check_listing(card)
    return {file.name: await _fetch(file, instance, call) for file in card.files}


async def _fetch(file: ModelFile, instance: Instance, call: Caller) -> bytes:
    chunks = await call(instance, MODEL_FILE, ModelFileRequest(file.name), timeout=TIMEOUT)
    data = b"".join(chunk.data for chunk in chunks if isinstance(chunk, ModelFileChunk))
    if len(data) != file.size or hashlib.sha256(data).hexdigest() != file.sha256:
        raise StreamIncomplete(f"file {file.name!r} from worker {instance.instance_id:x} is not what its card says")
    return data
