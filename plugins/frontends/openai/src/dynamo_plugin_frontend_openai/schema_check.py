"""Whether an answer is as its schema says, where no grammar made it so.

Schemas come from clients and may take any time to check, so that a process of its own does it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from dynamo_core import TaskSet

from dynamo_plugin_frontend_openai.template_child import Checked, SchemaJob
from dynamo_plugin_frontend_openai.template_process import STARTS, LimitedProcess

if TYPE_CHECKING:
    from dynamo_core import FrontendServices

    from dynamo_plugin_frontend_openai.choices import Choice

log = logging.getLogger(__name__)

#: Seconds for a check, and for the wait before it.
_TIMEOUT = 2.0
_END = 5.0
#: The reasons for which an answer ends that is all there.
_WHOLE = ("stop", "tool_calls")


@dataclass(frozen=True, slots=True)
class Claim:
    """A text that is to obey a schema; `what` is how messages call it."""

    what: str
    text: str
    schema: dict[str, Any] | bool


class Verdict(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why an answer is not what was asked for. `valid` is None where that could not be found out."""

    valid: bool | None
    error: str


class SchemaChecker:
    """Checks answers, one after the other, in a process that is started when it is first needed."""

    def __init__(self, services: FrontendServices, timeout: float = _TIMEOUT) -> None:
        self._timeout = timeout
        self._process: LimitedProcess | None = None
        self._turn = asyncio.Lock()
        self._closed = False
        self._tasks = TaskSet()
        self._count = services.metrics.counter(
            f"{services.metrics_prefix}_structured_output_violations_total",
            "Answers flagged with structured_output: they break the schema of their request, or could not be checked.",
            ("model",),
        )

    def of(self, choices: Sequence[Choice], model: str) -> Callable[[], Awaitable[None]] | None:
        """What gives choices their verdicts, once they have ended; None if none is to be checked."""
        wanted = any(choice.answered is not None for choice in choices)
        return partial(self._look, choices, model) if wanted else None

    async def _look(self, choices: Sequence[Choice], model: str) -> None:
        for choice in choices:
            # One that was cut off says so itself.
            if choice.answered is not None and choice.finish_reason in _WHOLE:
                claims = list(choice.answered.claims())
                choice.verdict = await self.check(claims, model) if claims else None

    async def check(self, claims: Sequence[Claim], model: str) -> Verdict | None:
        """What is wrong with an answer of this model; None if nothing is."""
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(self._timeout) as deadline, self._turn:
                process, self._process = self._process or LimitedProcess(self._tasks, "jsonschema"), None
                deadline.reschedule(clock() + STARTS)
                await process.start()
                deadline.reschedule(clock() + self._timeout)
                checked = await self._ask(process, claims)
        except TimeoutError:
            checked = None
        if checked is None:
            verdict = Verdict(None, "it took too long to check")
        elif checked.at is None:
            return None
        else:
            what = claims[checked.at].what
            why = f"its schema cannot be used: {checked.fault}" if checked.violation is None else checked.violation
            verdict = Verdict(None if checked.violation is None else False, f"{what}: {why}")
        self._count.labels(model).inc()
        log.info("an answer of %s is not what was asked for: %s", model, verdict.error)
        return verdict

    async def aclose(self) -> None:
        """Ends the process; a check that still runs ends its own. Safe twice."""
        self._closed = True
        await self._tasks.join(_END)
        if self._process is not None:
            await self._process.end()

    async def _ask(self, process: LimitedProcess, claims: Sequence[Claim]) -> Checked | None:
        job = SchemaJob([(claim.text, claim.schema) for claim in claims], self._timeout)
        checked = await process.ask(lambda: job, Checked)
        if checked is None or checked.last or self._closed:
            await process.end()
        else:
            self._process = process
        return checked
