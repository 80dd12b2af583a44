"""Without the library, without a model, in a role that there is not: one line that says what to do."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from dynamo_core import DisaggregationMode, WorkerConfig
from dynamo_core.errors import ConfigError
from dynamo_plugin_engine_transformers.config import TransformersConfig
from dynamo_plugin_engine_transformers.engine import TransformersEngine
from dynamo_testing.tiny_model import make_tokenizer_folder


@pytest.mark.skipif(find_spec("torch") is not None, reason="the library is installed")
def test_a_missing_library_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    folder = make_tokenizer_folder(tmp_path / "a-model", vocab_size=400)
    command = ["serve", "--engine", "transformers", "--model", str(folder), "--http-port", "0"]

    done = subprocess.run(
        [sys.executable, "-m", "dynamo_runtime.cli.main", *command], capture_output=True, text=True, timeout=40
    )

    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if "pip install" in line]
    assert len(lines) == 1
    assert "pip install 'dynamo-plugin-engine-transformers[torch]'" in lines[0]
    assert "Traceback" not in done.stderr


async def test_an_engine_without_a_model_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"workers\.laptop\.model\.path: .* needs the model's folder"):
        await TransformersEngine(TransformersConfig(), WorkerConfig(worker="laptop")).start(1)


async def test_prefill_and_decode_roles_are_refused() -> None:
    worker = WorkerConfig(model_path="x", disaggregation_mode=DisaggregationMode.DECODE)

    with pytest.raises(ConfigError, match="no prefill and decode roles"):
        await TransformersEngine(TransformersConfig(), worker).start(1)
