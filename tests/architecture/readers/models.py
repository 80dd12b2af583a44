"""Readers of what belongs to a model, and of what engines say."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec
from dynamo_core import MODEL_CONFIG, TOKENIZER, BackendError, KvEvent, KvStored, PrefillResult, PreprocessedRequest
from dynamo_core.errors import ConfigError, InvalidArgument, Unknown
from dynamo_core.protocol import UNREADABLE, ModelCard
from dynamo_runtime.worker.probe_request import probe_request
from dynamo_testing.tiny_model import make_tokenizer_folder
from dynamo_text import CallArray
from dynamo_text.hf_tokenizer import HFTokenizer
from dynamo_wire import encode as pack

from tests.architecture.bad_bytes import msgpack_bodies, plain_bodies
from tests.architecture.readers.registry import Feed, reader, says, to_json


@reader("dynamo_text.hf_tokenizer:_json read_json", good=[b'{"eos_token_id": 3}'], raises=[ConfigError])
async def model_settings() -> AsyncGenerator[Feed, None]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = (make_tokenizer_folder(Path(folder), vocab_size=300) / TOKENIZER).read_bytes()
    made: list[HFTokenizer] = []

    def feed(data: bytes) -> None:
        with suppress(ConfigError):
            HFTokenizer({TOKENIZER: data})
        made[:] = [HFTokenizer({TOKENIZER: tokenizer, MODEL_CONFIG: data})]

    yield feed
    assert made[0].eos_token_ids == (3,)


class _Model:
    """As much of a model as its template needs."""

    name = "m"
    card = ModelCard(name="m", instance_id=1, tokenizer="hf")

    def __init__(self, data: bytes) -> None:
        self._data = data

    def file(self, name: str) -> bytes | None:
        return self._data if name == "tokenizer_config.json" else None


@reader(good=[b'{"chat_template": "x"}'], raises=[Unknown, InvalidArgument])
async def templates() -> AsyncGenerator[Feed, None]:
    from dynamo_generation.templates.template import load_template

    yield lambda data: load_template(cast(Any, _Model(data)))


@reader(
    "dynamo_plugin_engine_transformers.request_sampling:model_defaults read_json",
    good=[b'{"temperature": 0.5}'],
)
async def generation_settings() -> AsyncGenerator[Feed, None]:
    from dynamo_plugin_engine_transformers.request_sampling import model_defaults

    found: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:

        def feed(data: bytes) -> None:
            (Path(folder) / "generation_config.json").write_bytes(data)
            found[:] = [model_defaults(folder)]

        yield feed
    assert found == [{"temperature": 0.5}]


@reader(
    "dynamo_runtime.worker.probe_request:probe_request decoding.read_json",
    "dynamo_runtime.worker.probe_request:probe_request msgspec.convert",
    "dynamo_runtime.worker.probe_request:_first_token decoding.read_json",
    bodies=plain_bodies,
    good=[b'{"token_ids": [1]}'],
)
async def probes() -> AsyncGenerator[Feed, None]:
    made: list[Any] = []

    async def feed(data: bytes) -> None:
        text = data.decode(errors="surrogateescape").replace("@", "")
        await probe_request(None, None, card=_Model.card, files={MODEL_CONFIG: data})
        made[:] = [await probe_request(text, None, card=_Model.card, files={})]

    yield feed
    assert made[0].token_ids == [1]


@reader(
    "dynamo_text.json_calls:CallObject._take json.loads",
    "dynamo_text.json_calls:_text json.loads",
    good=[b'[{"name": "f", "arguments": {}}]', b'[{"name": "f", "arguments": "{}"}]'],
)
async def calls_in_answers() -> AsyncGenerator[Feed, None]:
    begun: list[str] = []

    class Sink:
        buffered = False

        def accepts(self, name: str) -> bool:
            return True

        def begin_call(self, name: str) -> None:
            begun.append(name)

        def arguments(self, text: str) -> None:
            text.encode()

    yield lambda data: CallArray(cast(Any, Sink())).feed(data.decode(errors="replace"))
    assert begun[-2:] == ["f", "f"]


@reader("dynamo_plugin_parsers_standard.schema_values:_is_json json.loads", bodies=plain_bodies, good=[b'{"a":1}'])
async def values_of_tagged_calls() -> AsyncGenerator[Feed, None]:
    from dynamo_plugin_parsers_standard.schema_values import ANY_JSON, json_of

    found: list[str] = []
    yield lambda data: found.append(json_of(data.decode(errors="replace"), ANY_JSON))
    assert found[-1] == '{"a":1}'


@reader(
    "dynamo_plugin_parsers_standard.response_template:read_template msgspec.convert",
    raises=(ValueError,),
    good=[
        b'{"response_template": {"start_anchor": "a:", "fields": {"thinking": {"open": "<t>", "close": "</t>"},'
        b' "tool_calls": {"open_pattern": "<c (?P<name>.*?)>", "close": "</c>", "content": "json",'
        b' "transform": {"function": {"name": "{name}", "arguments": "{content}"}}}}}}'
    ],
)
async def described_formats() -> AsyncGenerator[Feed, None]:
    from dynamo_plugin_parsers_standard.reasoning_regions import TemplateReasoningParser
    from dynamo_plugin_parsers_standard.response_template import TemplateParser
    from dynamo_runtime.worker.parser_choice import model_text

    found: list[Any] = []

    def feed(data: bytes) -> None:
        model = model_text({"tokenizer_config.json": data})
        found[:] = [TemplateParser.for_model(model).FORMAT.opens, TemplateReasoningParser.for_model(model).MARKERS]

    yield feed
    assert found == [("<c",), ("<t>", "<c", "</t>", "</c>")]


@reader(
    "dynamo_plugin_parsers_standard.schema_values:python_expression ast.parse", bodies=plain_bodies, good=[b"(a=1)"]
)
async def pythonic_calls() -> AsyncGenerator[Feed, None]:
    from dynamo_plugin_parsers_standard.pythonic_calls import _arguments

    found: list[Any] = []

    def feed(data: bytes) -> None:
        text = data.decode(errors="surrogateescape")
        _arguments(f"(a={text})")
        found[:] = [_arguments(text)]

    yield feed
    assert found == ['{"a": 1}']


CHUNK = to_json(
    {
        "choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {"content": []}, "finish_reason": None}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}},
    }
)


@reader(
    "dynamo_plugin_engine_upstream.response:_chunks msgspec.json.Decoder",
    good=[CHUNK],
    raises=[BackendError.StreamIncomplete],
)
async def chunks_of_servers() -> AsyncGenerator[Feed, None]:
    from dynamo_plugin_engine_upstream.response import ResponseReader, ServerError

    def feed(data: bytes) -> None:
        with suppress(ServerError):
            ResponseReader(1).read(data)

    yield feed


@reader(
    "dynamo_plugin_engine_upstream.pooling:_answers msgspec.json.Decoder",
    good=[b'{"data": [{"index": 0, "embedding": [0.5], "score": 1}], "usage": {"prompt_tokens": 1}}'],
    raises=[BackendError.Unknown],
)
async def vectors_and_scores_of_servers() -> AsyncGenerator[Feed, None]:
    from dynamo_plugin_engine_upstream.pooling import SCORE, read_embeddings, read_scores

    def feed(data: bytes) -> None:
        read_embeddings(data, 1)
        read_scores(data, 1, SCORE)

    yield feed


@reader(
    "dynamo_plugin_engine_upstream.client:_lists msgspec.json.Decoder",
    "dynamo_plugin_engine_upstream.server_errors:_bodies msgspec.json.Decoder",
    good=[b'{"data": [{"id": "m"}]}'],
    raises=[BackendError.CannotConnect],
)
async def servers_models_and_errors() -> AsyncGenerator[Feed, None]:
    from dynamo_plugin_engine_upstream.client import Client
    from dynamo_plugin_engine_upstream.config import UpstreamConfig
    from dynamo_plugin_engine_upstream.server_errors import error_object, stream_error

    async with says() as (url, say):
        client = Client(UpstreamConfig(url=url))
        listed: list[Any] = []

        async def feed(data: bytes) -> None:
            stream_error(error_object(data), {})
            say(data)
            listed[:] = await client.models() or []

        yield feed
        assert listed == [{"id": "m"}]
        await client.aclose()


BATCH = pack([0.0, [{"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2, 3, 4], "block_size": 4}]])


@reader(
    "dynamo_plugin_engine_vllm.subscription:EventSequencer.__init__ msgspec.msgpack.Decoder",
    bodies=msgpack_bodies,
    good=[BATCH],
)
async def batches_of_vllm() -> AsyncGenerator[Feed, None]:
    from dynamo_plugin_engine_vllm.events import EventTranslator
    from dynamo_plugin_engine_vllm.subscription import EventSequencer

    told: list[KvEvent] = []
    sequencer = EventSequencer(0, EventTranslator(4), told.append)
    yield lambda data: sequencer.batch(sequencer.expected, data)
    assert isinstance(told[-1].data, KvStored)


@reader("dynamo_plugin_engine_mocker.handoff:check_handoff msgspec.convert", raises=[BackendError.InvalidArgument])
async def handoffs() -> AsyncGenerator[Feed, None]:
    from dynamo_plugin_engine_mocker.handoff import Handoff, check_handoff

    request = PreprocessedRequest(model="m", token_ids=[1, 2])

    def feed(data: bytes) -> None:
        with suppress(*UNREADABLE):
            request.prefill_result = PrefillResult(disaggregated_params=msgspec.json.decode(data))
        check_handoff(request)

    yield feed
    request.prefill_result = PrefillResult(disaggregated_params=Handoff.of(request, "id", 0).params())
    check_handoff(request)
