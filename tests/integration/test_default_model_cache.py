"""A frontend between processes keeps model files in the user's own cache folder, unless the settings say otherwise."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from dynamo_runtime.assembly.process_lifecycle import Application
from dynamo_runtime.assembly.process_roles import Role
from dynamo_runtime.settings import load_settings
from dynamo_testing.tiny_model import make_tokenizer_folder

CONFIG = """
frontend: {{port: 0}}
client: {{drain_grace: 0{cache}}}
transport: {{use: tcp}}
discovery: {{use: file, path: "{folder}"}}
workers:
  mock: {{model: {{name: m, path: "{model}"}}, engine: {{use: mocker}}, grace_period: 0}}
"""


@pytest.mark.parametrize(("cache", "kept"), [("", True), (", model_cache: ''", False)])
async def test_model_files_are_cached_by_default(
    stack: AsyncExitStack, tmp_path: Path, cache: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = make_tokenizer_folder(tmp_path / "model")
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(cache=cache, folder=tmp_path / "discovery", model=model))
    loaded = load_settings(path, env={})
    for role in (Role(False, ("mock",), 0), Role(True, (), 0)):
        application = Application(loaded, role)
        await application.start()
        stack.push_async_callback(application.stop, grace=False)

    async with asyncio.timeout(60):
        await application.ready()

    assert any((tmp_path / "cache").rglob("*")) is kept
