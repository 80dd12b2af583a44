"""The limits keep what every admission promises."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, cast

import pytest
from dynamo_core import Admission
from dynamo_plugin_admission_rate_limit.admission import RateLimitAdmission
from dynamo_plugin_admission_rate_limit.config import RateLimitConfig
from dynamo_plugin_admission_rate_limit.shared_config import SharedConfig
from dynamo_testing.admission_kit import AdmissionFactory, AdmissionKit


class _Kit(AdmissionKit):
    CONFIG = RateLimitConfig()

    def held(self, admission: Admission) -> int:
        return cast(RateLimitAdmission, admission).held

    @pytest.fixture
    def make_admission(self) -> AdmissionFactory:
        return partial(RateLimitAdmission, self.CONFIG)


class TestWithoutALimit(_Kit):
    """Everything is let in."""


class TestRequestsOfAMinute(_Kit):
    """Ten."""

    CONFIG = RateLimitConfig(requests_per_minute=10)
    BUDGET = 10


class TestTokensOfAMinute(_Kit):
    """Those of ten prompts."""

    CONFIG = RateLimitConfig(tokens_per_minute=30)
    BUDGET = 10


class TestConcurrentRequests(_Kit):
    """Three."""

    CONFIG = RateLimitConfig(concurrent_requests=3)
    LIMIT: ClassVar[int | None] = 3


class TestConcurrentRequestsOfSeveralFrontends(TestConcurrentRequests):
    """Three, counted by a server. Its answers take longer than the turns of the loop that checks of `LIMIT` wait."""

    LIMIT = None

    @pytest.fixture
    def make_admission(self, server: Any) -> AdmissionFactory:
        config = self.CONFIG.model_copy(update={"shared": SharedConfig(url=server.url, timeout=1.5)})
        return partial(RateLimitAdmission, config)
