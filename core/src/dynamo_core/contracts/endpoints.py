"""The endpoints that every worker serves."""

from __future__ import annotations

from dynamo_core.contracts.call import Endpoint
from dynamo_core.protocol.events import KvHistoryPart, KvHistoryRequest
from dynamo_core.protocol.files import ModelFileChunk, ModelFileRequest
from dynamo_core.protocol.output import LLMEngineOutput, merge_outputs
from dynamo_core.protocol.request import EmbedOutput, EmbedRequest, PreprocessedRequest

GENERATE = Endpoint("generate", PreprocessedRequest, LLMEngineOutput, merge_outputs)
EMBED = Endpoint("embed", EmbedRequest, EmbedOutput)
MODEL_FILE = Endpoint("model_file", ModelFileRequest, ModelFileChunk)
#: Refused as `NotSupported` by a worker that does not keep track of its own cache.
KV_HISTORY = Endpoint("kv_history", KvHistoryRequest, KvHistoryPart)
