"""The fair queue keeps what every admission promises, however it is bounded."""

from __future__ import annotations

from typing import Any

import pytest
from dynamo_core import Admission
from dynamo_plugin_admission_fair_queue.admission import FairQueueAdmission
from dynamo_plugin_admission_fair_queue.config import FairQueueConfig, TenantSettings
from dynamo_plugin_admission_fair_queue.shared_config import SharedConfig
from dynamo_testing.admission_kit import AdmissionFactory, AdmissionKit


class _Kit(AdmissionKit):
    CONFIG = FairQueueConfig(max_wait=0.5)

    @pytest.fixture
    def make_admission(self) -> AdmissionFactory:
        return lambda services: FairQueueAdmission(self.CONFIG, services)

    def held(self, admission: Admission) -> int:
        assert isinstance(admission, FairQueueAdmission)
        return admission.held


class TestThresholdsAlone(_Kit):
    """As many as the workers' loads allow."""


class TestNobodyWaits(_Kit):
    """Without a queue it refuses as token-capacity does."""

    CONFIG = FairQueueConfig(max_queue=0)


class TestRequestsOfWorkers(_Kit):
    """Two for each of the two workers."""

    CONFIG = FairQueueConfig(max_wait=0.5, requests_per_worker=2)
    LIMIT = 4


class TestRequestsOfATenant(_Kit):
    """Three at once."""

    CONFIG = FairQueueConfig(max_wait=0.5, default_tenant=TenantSettings(concurrency=3))
    LIMIT = 3


class TestRequestsOfATenantOverSeveralFrontends(TestRequestsOfATenant):
    """Three at once, and others would be told of them."""

    @pytest.fixture
    def make_admission(self, server: Any) -> AdmissionFactory:
        config = self.CONFIG.model_copy(update={"shared": SharedConfig(url=server.url)})
        return lambda services: FairQueueAdmission(config, services)
