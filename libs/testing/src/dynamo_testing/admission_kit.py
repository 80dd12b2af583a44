"""The kit for admissions: every promise about letting in, refusing and giving back as one check.

The author's whole test file::

    import pytest
    from dynamo_core.contracts.admission import Admission
    from dynamo_testing.admission_kit import AdmissionFactory, AdmissionKit

    class TestMine(AdmissionKit):
        @pytest.fixture
        def make_admission(self) -> AdmissionFactory:
            return lambda services: MyAdmission(MyConfig(), services)

        def held(self, admission: Admission) -> int:
            return admission.permits + len(admission.queue)

The kit makes the workers and their loads, and marks them busy as the admission says, as core does. One that bounds how
many requests run at a time is made with a small limit, which the class tells by `LIMIT`; one that lets requests wait is
made so that they wait for less than `WAIT` seconds. One that keeps clients within limits of their own tells by `BUDGET`
how many requests it lets in. A plugin with ``REFUSES_BY_LOAD = False`` says that the load of workers is no reason to
refuse; the checks of refusals under load are then skipped.
"""

from __future__ import annotations

from dynamo_testing.admission.entering import EntryChecks
from dynamo_testing.admission.harness import AdmissionFactory, AdmissionHarness, Hall
from dynamo_testing.admission.holding import HoldingChecks
from dynamo_testing.admission.limiting import LimitChecks

__all__ = ["AdmissionFactory", "AdmissionHarness", "AdmissionKit", "Hall"]


class AdmissionKit(EntryChecks, HoldingChecks, LimitChecks):
    """All checks of an admission. Subclass it as ``Test…``, and write the fixture `make_admission` and `held`."""
