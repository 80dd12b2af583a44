"""Plugins that were written for the version before this one."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from dynamo_testing import run_conformance
from dynamo_testing.migrate import MODULES, NAMES, migrated

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "migrate-to-api-2.md"

#: As authors wrote it: imports from modules that have moved, and names that have changed.
ENGINE = '''\
"""An engine that answers with the prompt."""

import asyncio
from collections.abc import AsyncIterator

from dynamo_core import GenerateContext, LLMEngine, LLMEngineOutput, PluginConfig, PreprocessedRequest, usage
from dynamo_core.contracts.engine import EngineConfig, WorkerConfig
from dynamo_core.directory.times import spread
from dynamo_core.protocol.ids import id_text
from dynamo_core.protocol.left_out import LeftOut as Warner
from dynamo_core.text.tokenizer import Tokenizer

DYNAMO_API = 1


class Engine(LLMEngine):
    NAME = "old"

    async def start(self, worker_id: int) -> EngineConfig:
        self.pause, self.shown_id = spread(0.001), id_text(worker_id)
        return EngineConfig(model=self.worker.model_name)

    async def generate(self, request: PreprocessedRequest, ctx: GenerateContext) -> AsyncIterator[LLMEngineOutput]:
        answer = request.token_ids[: request.stop_conditions.max_tokens]
        sent = 0
        while not ctx.is_stopped():
            if sent == len(answer):
                end = LLMEngineOutput.stop() if sent == len(request.token_ids) else LLMEngineOutput.length()
                yield end.with_usage(usage(len(request.token_ids), sent))
                return
            yield LLMEngineOutput(token_ids=[answer[sent]])
            sent += 1
            await asyncio.sleep(self.pause)
        yield LLMEngineOutput.cancelled().with_usage(usage(len(request.token_ids), sent))

    async def cleanup(self) -> None:
        pass


def make() -> Engine:
    return Engine(PluginConfig(), WorkerConfig(model_name="a-model"))
'''


def test_modules_that_have_moved_and_names_that_have_changed_are_rewritten() -> None:
    text, by_hand = migrated(ENGINE)

    assert "from dynamo_core import EngineConfig, WorkerConfig\n" in text
    assert "from dynamo_core import jitter\n" in text
    assert "from dynamo_core.protocol import UnreadableWarner as Warner\n" in text
    assert "from dynamo_core import Tokenizer\n" in text
    assert "self.pause, self.shown_id = jitter(0.001), format_instance_id(worker_id)" in text
    assert "DYNAMO_API = 2" in text
    assert by_hand == []


async def test_an_engine_for_version_1_keeps_the_contract_of_version_2_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "old_engine.py"
    path.write_text(migrated(ENGINE)[0])
    spec = spec_from_file_location("old_engine", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)

    assert (await run_conformance(module.make)).passed


def test_what_may_be_a_name_of_the_author_is_only_reported() -> None:
    text, by_hand = migrated("class Parser:\n    def want_whole(self): ...\n\nHttpRoute('GET', '/', f, early=True)\n")

    assert "want_whole" in text
    assert by_hand == [(2, "ToolCallParser.want_whole is buffer_calls"), (4, "HttpRoute.early is before_ready")]


def test_the_command_rewrites_a_folder_and_says_what_is_left(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "parser.py").write_text("def want_whole(self): ...\n")

    done = subprocess.run(
        [sys.executable, "-m", "dynamo_testing.migrate", str(tmp_path)], capture_output=True, text=True, timeout=30
    )

    assert done.stdout.splitlines() == [
        f"{tmp_path / 'engine.py'}: rewritten",
        f"{tmp_path / 'parser.py'}:1: look at ToolCallParser.want_whole is buffer_calls",
    ]
    assert done.returncode == 1
    assert (tmp_path / "engine.py").read_text() == migrated(ENGINE)[0]


@pytest.mark.parametrize("now", sorted({*NAMES.values()}))
def test_every_name_of_the_table_can_be_had(now: str) -> None:
    module, _, name = now.rpartition(".")

    assert hasattr(import_module(module), name)


def test_the_page_has_every_row_of_the_tables() -> None:
    page = PAGE.read_text()

    for was, now in MODULES.items():
        assert f"| `{was}` | `{now.removesuffix('.*')}` |" in page
    for (module, name), now in NAMES.items():
        assert f"| `{module}.{name}` | `{now}` |" in page
