"""The frontend keeps what every frontend promises, in both ways of asking."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_plugin_frontend_openai.config import OpenAIConfig
from dynamo_plugin_frontend_openai.frontend import OpenAIFrontend
from dynamo_testing import Asked, FrontendFactory, FrontendKit


def chat(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]}


class _Kit(FrontendKit):
    @pytest.fixture
    def make_frontend(self) -> FrontendFactory:
        return lambda services: OpenAIFrontend(OpenAIConfig(), services)

    def ask_streaming(self, model: str, prompt: str) -> Asked:
        asked = self.ask(model, prompt)
        return asked._replace(body=asked.body | {"stream": True})


class TestCompletions(_Kit):
    def ask(self, model: str, prompt: str) -> Asked:
        return Asked("POST", "/v1/completions", {"model": model, "prompt": prompt})


class TestChat(_Kit):
    def ask(self, model: str, prompt: str) -> Asked:
        return Asked("POST", "/v1/chat/completions", {"model": model, **chat(prompt)})
