"""What tests of records share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def chat() -> dict[str, Any]:
    """Return the fields of the record of a streamed chat that went well, but for its ids, tokens and times."""
    return {
        "model": "m",
        "endpoint": "chat_completions",
        "request_type": "stream",
        "status": "success",
        "error_type": "",
        "http_status": 200,
        "finish_reason": "stop",
        "x_request_id": None,
    }
