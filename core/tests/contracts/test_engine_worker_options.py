"""What a worker config says of a worker, and what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from dynamo_core import (
    DisaggregationMode,
    EngineConfig,
    KvEventSource,
    LoadSource,
    PluginConfig,
    WorkerConfig,
)
from dynamo_core.contracts.model_folder import CHAT_TEMPLATE, TOKENIZER
from dynamo_core.errors import ConfigError
from dynamo_core.protocol.records import ModelFile
from dynamo_runtime.worker.card import make_card
from dynamo_runtime.worker.model_files import ModelFiles, read_files
from dynamo_runtime.worker.publishers import EnginePublishers

from runtime.tests.worker.engines import Plain


@pytest.mark.parametrize(
    ("config", "indexed"),
    [
        (WorkerConfig(), True),
        (WorkerConfig(enable_local_indexer=False), False),
        (WorkerConfig(disaggregation_mode=DisaggregationMode.PREFILL), True),
        (WorkerConfig(disaggregation_mode=DisaggregationMode.DECODE), False),
    ],
)
def test_the_card_says_whether_the_worker_has_a_local_indexer(config: WorkerConfig, indexed: bool) -> None:
    card = make_card(1, config, EngineConfig(model="m"), [])

    assert card.runtime_config.enable_local_indexer is indexed


def test_a_configured_template_replaces_the_folders_template(tmp_path: Path) -> None:
    (tmp_path / TOKENIZER).write_text("{}")
    (tmp_path / CHAT_TEMPLATE).write_text("the folder's")
    (tmp_path / "own.jinja").write_text("my own")

    plain = read_files(WorkerConfig(model_path=str(tmp_path)))
    own = read_files(WorkerConfig(model_path=str(tmp_path), custom_jinja_template=str(tmp_path / "own.jinja")))

    assert plain[CHAT_TEMPLATE] == b"the folder's"
    assert own == plain | {CHAT_TEMPLATE: b"my own"}


def test_a_template_without_a_folder_keeps_the_byte_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("my own")

    files = read_files(WorkerConfig(custom_jinja_template=str(tmp_path / "own.jinja")))
    card = make_card(1, WorkerConfig(), EngineConfig(model="m"), ModelFiles(files).listing())

    assert list(files) == [CHAT_TEMPLATE]
    assert card.tokenizer == "bytes"
    assert [file.name for file in card.files] == [CHAT_TEMPLATE]


def test_workers_with_different_templates_are_different_models() -> None:
    def listing(text: bytes) -> list[ModelFile]:
        return ModelFiles({CHAT_TEMPLATE: text}).listing()

    one, same, other = (
        make_card(1, WorkerConfig(), EngineConfig(model="m"), listing(text)) for text in (b"a", b"a", b"b")
    )

    assert one.checksum == same.checksum
    assert one.checksum != other.checksum


def test_a_missing_template_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"chat template .*/none.jinja does not exist; set model.custom_jinja_template"
    ):
        read_files(WorkerConfig(custom_jinja_template=str(tmp_path / "none.jinja")))


class Telling(Plain):
    """Says that its cache can be known, and whether it was asked."""

    asked = False
    loads_asked = False

    async def kv_event_sources(self) -> Sequence[KvEventSource]:
        self.asked = True
        return []

    async def load_sources(self) -> Sequence[LoadSource]:
        self.loads_asked = True
        return []


@pytest.mark.parametrize("wanted", [True, False])
async def test_kv_event_sources_are_requested_only_if_routers_use_them(wanted: bool) -> None:
    engine = Telling(PluginConfig(), WorkerConfig())
    nothing: Any = None  # a plane and a lease: nobody publishes where there are no sources

    await EnginePublishers().start(engine, nothing, nothing, kv_events=wanted)

    assert engine.asked is wanted
    assert engine.loads_asked
