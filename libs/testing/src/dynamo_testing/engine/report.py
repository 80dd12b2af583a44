"""The report of a run of the kit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

OK, SKIPPED, FAILED = "ok", "skipped", "FAILED"


class ConformanceFailure(AssertionError):
    """An engine does not keep its contract. `seen` is what the kit saw, in words."""

    #: What the contract says, as one clause.
    CONTRACT: ClassVar[str] = ""
    #: What its author can do, as one sentence without a full stop.
    REMEDY: ClassVar[str] = ""

    def __init__(self, seen: str) -> None:
        super().__init__(seen)
        self.seen = seen
        #: The name of the check that failed.
        self.check = ""
        #: Everything up to the failure, once a whole run has ended with it.
        self.report: Report | None = None

    @property
    def name(self) -> str:
        """The name of the failure."""
        return type(self).__name__

    def __str__(self) -> str:
        return f"{self.seen}\n  the contract: {self.CONTRACT}\n  what to do: {self.REMEDY}"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check: its contract, its outcome, and the observation. `duration` is in seconds."""

    name: str
    promise: str
    #: `OK`, `SKIPPED` or `FAILED`.
    outcome: str
    seen: str
    duration: float
    failure: ConformanceFailure | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        result: dict[str, Any] = {
            "check": self.name,
            "promise": self.promise,
            "outcome": self.outcome.lower(),
            "seen": self.seen,
            "duration": round(self.duration, 3),
        }
        if self.failure is not None:
            result["failure"] = self.failure.name
            result["contract"] = self.failure.CONTRACT
            result["remedy"] = self.failure.REMEDY
        return result


@dataclass(slots=True)
class Report:
    """A run: the engine's class, its role and model, and every check that was made. `duration` is in seconds."""

    engine: str = ""
    mode: str = ""
    model: str = ""
    checks: list[CheckResult] = field(default_factory=list)
    duration: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.outcome != FAILED for check in self.checks)

    def count(self, outcome: str) -> int:
        """Return how many checks ended so."""
        return sum(check.outcome == outcome for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return {
            "engine": self.engine,
            "mode": self.mode,
            "model": self.model,
            "passed": self.passed,
            "duration": round(self.duration, 3),
            "checks": [check.as_dict() for check in self.checks],
        }

    def as_text(self) -> str:
        """Return one line per check, with the contract and a remedy where one failed, and a line that sums up."""
        return "\n".join([*(line_of(check) for check in self.checks), self.summary()])

    def summary(self) -> str:
        """Return the last line of the text."""
        if not self.passed:
            return f"The engine does not keep its contract: {self.count(OK)} checks were ok before one failed."
        skipped = f", {self.count(SKIPPED)} skipped" if self.count(SKIPPED) else ""
        return f"The engine keeps its contract: {self.count(OK)} checks ok{skipped}, in {self.duration:.1f} s."


#: As wide as the longest outcome and the longest name of a check.
_OUTCOME_WIDTH, _NAME_WIDTH = 7, 21


def line_of(check: CheckResult) -> str:
    """Return a check as text: one line, or three if it failed."""
    start = f"{check.outcome:{_OUTCOME_WIDTH}}  "
    if check.failure is None:
        return f"{start}{check.name:{_NAME_WIDTH}}  {check.seen}"
    indent = " " * len(start)
    return "\n".join(
        [
            f"{start}{check.failure.name}: {check.seen}",
            f"{indent}the check:    {check.name}: {check.promise}",
            f"{indent}the contract: {check.failure.CONTRACT}",
            f"{indent}what to do:   {check.failure.REMEDY}",
        ]
    )
