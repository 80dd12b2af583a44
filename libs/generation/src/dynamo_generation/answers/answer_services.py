"""Settings and services that every generating route shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dynamo_generation.answers.loop_scheduler import LoopScheduler
from dynamo_generation.answers.usage import UsageWatch

if TYPE_CHECKING:
    from dynamo_core import TaskSet

    from dynamo_generation.answers.answer_memory import AnswerMemory
    from dynamo_generation.choices.schema_check import SchemaChecker


@dataclass(frozen=True, slots=True)
class Answering:
    """The settings and services for writing answers.

    `tasks` keeps what must run to its end although its request is over. `write_buffer` is how many bytes may wait for a
    slow reader.
    """

    tasks: TaskSet
    write_buffer: int
    memory: AnswerMemory
    checker: SchemaChecker
    scheduler: LoopScheduler = field(default_factory=LoopScheduler)
    usage_watch: UsageWatch = field(default_factory=UsageWatch)
