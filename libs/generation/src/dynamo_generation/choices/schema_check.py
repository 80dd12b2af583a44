"""The check of a finished answer against its JSON schema, where no grammar guided the engine.

Schemas come from clients and may take any time to check, so that a process of its own does it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakValueDictionary

from dynamo_core import TaskSet

from dynamo_generation.choices.choice import Choice
from dynamo_generation.choices.schema_validation import SchemaConstraint, Verdict
from dynamo_generation.templates.child import Checked, SchemaJob
from dynamo_generation.templates.render_processes import PROCESSES, STARTS, LimitedProcess

if TYPE_CHECKING:
    from dynamo_core import FrontendServices, Principal

Constraints: TypeAlias = Sequence[SchemaConstraint]

log = logging.getLogger(__name__)

#: Seconds for a check, and for the wait before it.
_TIMEOUT = 2.0
#: Seconds for the first try of a check, far more than ordinary schemas need. A longer check is tried again in a queue
#: of its own.
_QUICK = 0.2
_END = 5.0
#: The reasons for which an answer ends that is all there.
_WHOLE = ("stop", "tool_calls")


class _Queue:
    """A fair queue for a few processes: each owner has one check at a time, behind one of every other owner."""

    def __init__(self) -> None:
        self.room = asyncio.Semaphore(PROCESSES)
        self._turns: WeakValueDictionary[object, asyncio.Lock] = WeakValueDictionary()

    def turn_of(self, owner: object) -> asyncio.Lock:
        """Return the lock that the checks of an owner take one after the other."""
        return self._turns.setdefault(owner, asyncio.Lock())


class SchemaChecker:
    """Checks answers in a few processes, which are started when they are first needed.

    Checks that take long have a queue of their own, so that the others wait for short ones only.
    """

    def __init__(self, services: FrontendServices, timeout: float = _TIMEOUT) -> None:
        self._timeout = timeout
        self._idle: list[LimitedProcess] = []
        self._quick, self._long = _Queue(), _Queue()
        self._closed = False
        self._tasks = TaskSet()
        self._count = services.metrics.counter(
            f"{services.metrics_prefix}_structured_output_violations_total",
            "Answers flagged with structured_output: they break the schema of their request, or could not be checked.",
            ("model",),
        )

    def of(self, choices: Sequence[Choice], model: str, principal: Principal) -> Callable[[], Awaitable[None]] | None:
        """Return what gives choices their verdicts, once they have ended; None if none is to be checked."""
        wanted = any(choice.answered is not None for choice in choices)
        # Clients without keys cannot be told apart: each request stands for itself.
        owner = (principal.key_id, principal.tenant) if principal.key_id else object()
        return partial(self._look, choices, model, owner) if wanted else None

    async def _look(self, choices: Sequence[Choice], model: str, owner: object) -> None:
        for choice in choices:
            # One that was cut off says so itself.
            if choice.answered is not None and choice.finish_reason in _WHOLE:
                constraints = list(choice.answered.constraints())
                choice.verdict = await self.check(constraints, model, owner) if constraints else None

    async def check(self, constraints: Constraints, model: str, owner: object) -> Verdict | None:
        """Return what is wrong with an answer of this model; None if nothing is. An owner has one check at a time."""
        quick = min(_QUICK, self._timeout)
        checked = await self._try(self._quick, owner, constraints, quick)
        if checked is None and quick < self._timeout:
            checked = await self._try(self._long, owner, constraints, self._timeout)
        if checked is None:
            verdict = Verdict(None, "it took too long to check")
        elif checked.at is None:
            return None
        else:
            what = constraints[checked.at].what
            why = f"its schema cannot be used: {checked.fault}" if checked.violation is None else checked.violation
            verdict = Verdict(None if checked.violation is None else False, f"{what}: {why}")
        self._count.labels(model).inc()
        log.info("an answer of %s is not what was asked for: %s", model, verdict.error)
        return verdict

    async def aclose(self) -> None:
        """End the processes; a check that still runs ends its own. Safe twice."""
        self._closed = True
        await self._tasks.join(_END)
        await asyncio.gather(*(process.end() for process in self._idle))
        self._idle.clear()

    async def _try(self, queue: _Queue, owner: object, constraints: Constraints, seconds: float) -> Checked | None:
        """Return what a process has found within `seconds`; None if it took longer, or waited too long for its turn."""
        clock = asyncio.get_running_loop().time
        turn = queue.turn_of(owner)
        try:
            async with asyncio.timeout(self._timeout) as deadline, turn, queue.room:
                process = self._idle.pop() if self._idle else LimitedProcess(self._tasks, "jsonschema")
                deadline.reschedule(clock() + STARTS)
                await process.start()
                deadline.reschedule(clock() + seconds)
                return await self._ask(process, constraints, seconds)
        except TimeoutError:
            return None

    async def _ask(self, process: LimitedProcess, constraints: Constraints, seconds: float) -> Checked | None:
        job = SchemaJob([(constraint.text, constraint.schema) for constraint in constraints], seconds)
        checked = await process.ask(lambda: job, Checked)
        if checked is None or checked.last or self._closed:
            await process.end()
        else:
            self._idle.append(process)
        return checked
