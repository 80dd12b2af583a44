"""The API keeps what every frontend promises, served alone."""

from __future__ import annotations

import pytest
from dynamo_plugin_frontend_responses.config import ResponsesConfig
from dynamo_plugin_frontend_responses.frontend import ResponsesFrontend
from dynamo_testing import Asked, FrontendFactory, FrontendKit


class TestResponses(FrontendKit):
    @pytest.fixture
    def make_frontend(self) -> FrontendFactory:
        return lambda services: ResponsesFrontend(ResponsesConfig(), services)

    def ask(self, model: str, prompt: str) -> Asked:
        return Asked("POST", "/v1/responses", {"model": model, "input": prompt})

    def ask_streaming(self, model: str, prompt: str) -> Asked:
        asked = self.ask(model, prompt)
        return asked._replace(body=asked.body | {"stream": True})
