"""The instruments of OpenTelemetry's conventions for generative AI, and what a request records in them."""

from __future__ import annotations

from typing import Final

from dynamo_core.protocol import RequestRecord
from dynamo_telemetry import gen_ai_attributes
from opentelemetry.metrics import Meter

#: Models with series of their own; those after them are `OTHER` together, as at ``/metrics``.
MODELS: Final = 1000
OTHER: Final = "other"

# The buckets that the conventions ask for.
DURATION: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
FIRST_TOKEN: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PER_TOKEN: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKENS: Final = tuple(4**power for power in range(14))


class Instruments:
    """Histograms of a meter, in seconds and in tokens."""

    def __init__(self, meter: Meter) -> None:
        histogram = meter.create_histogram
        self._duration = histogram(
            "gen_ai.server.request.duration",
            "s",
            "Generative AI server request duration such as time-to-last byte or last output token.",
            explicit_bucket_boundaries_advisory=DURATION,
        )
        self._first_token = histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "Time to generate first token for successful responses.",
            explicit_bucket_boundaries_advisory=FIRST_TOKEN,
        )
        self._per_token = histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Time per output token generated after the first token for successful responses.",
            explicit_bucket_boundaries_advisory=PER_TOKEN,
        )
        self._tokens = histogram(
            "gen_ai.client.token.usage",
            "{token}",
            "Number of input and output tokens used.",
            explicit_bucket_boundaries_advisory=TOKENS,
        )
        self._models: set[str] = set()

    def add(self, record: RequestRecord) -> None:
        """Record that a request has ended."""
        attributes = gen_ai_attributes(record.endpoint, self._name(record.model))
        if record.error_type:
            self._duration.record(record.duration, attributes | {"error.type": record.error_type})
        else:
            # A model answers under the name that it is asked by.
            attributes["gen_ai.response.model"] = attributes["gen_ai.request.model"]
            self._duration.record(record.duration, attributes)
            self._add_pace(record, attributes)
        if not record.error_type or record.instance_id is not None:
            # What no worker had has used no tokens.
            for kind, count in (("input", record.prompt_tokens), ("output", record.output_tokens)):
                if count:
                    self._tokens.record(count, attributes | {"gen_ai.token.type": kind})

    def _add_pace(self, record: RequestRecord, attributes: dict[str, str]) -> None:
        first, tokens = record.time_to_first_token, record.output_tokens
        if first is not None:
            self._first_token.record(first, attributes)
            if tokens > 1:
                self._per_token.record((record.duration - first) / (tokens - 1), attributes)

    def _name(self, model: str) -> str:
        if model not in self._models:
            if len(self._models) >= MODELS:
                return OTHER
            self._models.add(model)
        return model
