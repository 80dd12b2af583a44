"""The API keeps what every frontend promises, served alone."""

from __future__ import annotations

import pytest
from dynamo_plugin_frontend_ollama.config import OllamaConfig
from dynamo_plugin_frontend_ollama.frontend import OllamaFrontend
from dynamo_testing import Asked, FrontendFactory, FrontendKit


class _Kit(FrontendKit):
    @pytest.fixture
    def make_frontend(self) -> FrontendFactory:
        return lambda services: OllamaFrontend(OllamaConfig(), services)


class TestChat(_Kit):
    def ask(self, model: str, prompt: str) -> Asked:
        body = {"model": model, "stream": False, "messages": [{"role": "user", "content": prompt}]}
        return Asked("POST", "/api/chat", body)

    def ask_streaming(self, model: str, prompt: str) -> Asked:
        return Asked("POST", "/api/chat", {"model": model, "messages": [{"role": "user", "content": prompt}]})


class TestGenerate(_Kit):
    def ask(self, model: str, prompt: str) -> Asked:
        return Asked("POST", "/api/generate", {"model": model, "prompt": prompt, "raw": True, "stream": False})

    def ask_streaming(self, model: str, prompt: str) -> Asked:
        return Asked("POST", "/api/generate", {"model": model, "prompt": prompt, "raw": True})
