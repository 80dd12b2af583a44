"""Attribute names of OpenTelemetry's conventions for generative AI, for spans and metrics."""

from __future__ import annotations

#: The operations that the conventions know, by endpoint.
_OPERATIONS = {
    "chat_completions": "chat",
    "messages": "chat",
    "responses": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
}


def gen_ai_attributes(endpoint: str, model: str) -> dict[str, str]:
    """Return the attributes that spans and metrics of a request have alike.

    `endpoint` and `model` are those of a `RequestRecord`. An endpoint that the conventions do not know keeps its name.
    The provider is the server that a client sees, whatever engines are behind it.
    """
    return {
        "gen_ai.operation.name": _OPERATIONS.get(endpoint, endpoint),
        "gen_ai.provider.name": "dynamo",
        "gen_ai.request.model": model,
    }
