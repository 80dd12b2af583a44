"""Every reader of core and the plugins that decodes what another process wrote, ready to be fed with bytes.

A reader is a generator: it yields a function that takes bytes, and after the last call makes sure that good ones still
count. Each names the places in the sources that it covers; `TRUSTED` has those that no other process can reach.
"""

from __future__ import annotations

from tests.architecture.readers import calls, clients, discovery, messages, models
from tests.architecture.readers.registry import READERS, Feed

__all__ = ["READERS", "TRUSTED", "Feed", "calls", "clients", "discovery", "messages", "models"]

#: Places where nothing comes from another process, and why.
TRUSTED = {
    "dynamo_core.contracts.engine_boundary:check_engine_config msgspec.convert": "what an engine says of itself",
    "dynamo_runtime.settings.flag_table:read_plugin_flags tomllib.loads": "a file of an installed package",
    "dynamo_runtime.worker.stream_validator:vocabulary_of decoding.read_json": "config.json of the model folder",
    "dynamo_runtime.worker.parser_choice:_object decoding.read_json": "files of a model folder; bad ones say nothing",
    "dynamo_runtime.worker.parser_choice:_tokenizers msgspec.json.Decoder": "the tokenizer.json of that folder",
    "dynamo_core.protocol.decoding:read_json json.loads": "the helper itself; the places that use it are fed",
    "dynamo_text.text_splitter:state_of json.loads": "what the library of tokenizers says of itself, at most 128 deep",
    "dynamo_text.hf_tokenizer:HFTokenizer.__init__ json.loads": "what the library of tokenizers says of itself",
    "dynamo_plugin_discovery_etcd.wire:Keys.name base64.b64decode": "etcd's own encoding of a key",
    "dynamo_plugin_discovery_etcd.wire:record base64.b64decode": "etcd's own encoding of a value",
    "dynamo_runtime.processes.control:_decoder msgspec.json.Decoder": "a pair of sockets of a supervisor and its child",
    "dynamo_runtime.processes.supervised_reload:_requests msgspec.json.Decoder": "over that pair, of the same version",
    "dynamo_runtime.processes.supervised_reload:_replies msgspec.json.Decoder": "over that pair, of the same version",
    "dynamo_runtime.processes.supervised_reload:_reports msgspec.json.Decoder": "over that pair, of the same version",
    "dynamo_generation.choices.parsed_choice:is_object json.loads": "the text of a model, of which only this is asked",
    "dynamo_generation.templates.child:_violation json.loads": "the text of a model, whose faults are told",
    "dynamo_generation.templates.child:main msgspec.json.decode": "a pipe that only its parent writes to",
    "dynamo_generation.templates.render_processes:LimitedProcess._exchange msgspec.json.decode": (
        "a pipe of a process that runs our own code, and templates in a sandbox"
    ),
}
