"""The API keeps what every frontend promises, served alone."""

from __future__ import annotations

import pytest
from dynamo_plugin_frontend_anthropic.config import AnthropicConfig
from dynamo_plugin_frontend_anthropic.frontend import AnthropicFrontend
from dynamo_testing import Asked, FrontendFactory, FrontendKit


class TestMessages(FrontendKit):
    @pytest.fixture
    def make_frontend(self) -> FrontendFactory:
        return lambda services: AnthropicFrontend(AnthropicConfig(), services)

    def ask(self, model: str, prompt: str) -> Asked:
        body = {"model": model, "max_tokens": 100, "messages": [{"role": "user", "content": prompt}]}
        return Asked("POST", "/v1/messages", body)

    def ask_streaming(self, model: str, prompt: str) -> Asked:
        asked = self.ask(model, prompt)
        return asked._replace(body=asked.body | {"stream": True})
