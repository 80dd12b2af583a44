"""Checks with flipped bits: an answer may fail, but never differ.

`flip_bits` calls a worker again and again over a wire on which one frame of some has a bit changed, wherever that is:
in a handshake, in what a broker is told, in heads, numbers and payloads. Each answer is known from its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import ClassVar

import msgspec
from dynamo_core.contracts.requests.context import EngineContext
from dynamo_core.contracts.transports.call import Endpoint, ServedContext, Source
from dynamo_core.contracts.transports.transport import Transport
from dynamo_core.errors import Disconnected, DynamoError
from dynamo_core.protocol.output import LLMEngineOutput, merge_outputs
from dynamo_core.protocol.records import Instance

from dynamo_testing.faults import FaultPlan, Flip
from dynamo_testing.optional_packages import pytest
from dynamo_testing.transport.harness import Recorder

#: Of so many frames one is damaged, and an answer has so many tokens.
RARITY = 12
TOKENS = 24

#: Seconds that one call may take, and that a client waits after one that failed.
WAIT = 10.0
PAUSE = 0.01


class Prompt(msgspec.Struct):
    """The input that an answer depends on."""

    seed: int
    tokens: list[int]


TEXT = Endpoint("text", Prompt, LLMEngineOutput, merge_outputs)


@dataclass
class Damage:
    """The result of a damaged call."""

    #: Bits that were flipped.
    flips: int = 0
    whole: int = 0
    failed: int = 0
    #: Answers that had no end.
    hung: int = 0
    #: Answers of which something came that was not sent, or that ended too early and as if they were complete.
    wrong: list[str] = field(default_factory=list)


def prompt(seed: int) -> Prompt:
    """Return a prompt of its own for every seed."""
    dice = Random(seed)  # noqa: S311 - not a secret
    return Prompt(seed, [dice.randrange(100_000) for _ in range(TOKENS)])


def answer(asked: Prompt) -> list[int]:
    """Return the tokens that answer a prompt: each depends on all of it."""
    dice = Random(f"{asked.seed} {asked.tokens}")  # noqa: S311 - not a secret
    return [dice.randrange(100_000) for _ in range(TOKENS)]


async def speak(asked: Prompt, ctx: ServedContext) -> AsyncGenerator[LLMEngineOutput, None]:
    """Handle a call: the answer, token by token."""

    async def items() -> AsyncGenerator[LLMEngineOutput, None]:
        for token in answer(asked):
            yield LLMEngineOutput([token])
            await asyncio.sleep(0)

    return items()


async def flip_bits(
    clients: Sequence[Transport], instance: Instance, plan: FaultPlan, *, flips: int, seed: int
) -> Damage:
    """Have every client call a worker that serves `TEXT` with `speak`, until so many bits were flipped.

    `instance` is its record; `plan` is that of the wire between the clients and what they call.
    """
    dice, damage = Random(seed), Damage()  # noqa: S311 - not a secret
    rule = plan.inject(Flip(dice), when=lambda body: not dice.randrange(RARITY), times=None)

    async def call_again_and_again(client: Transport) -> None:
        while rule.fired < flips:
            await _ask(client, instance, dice.randrange(2**31), damage)

    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(call_again_and_again(client))
    damage.flips = rule.fired
    plan.remove(rule)
    return damage


@dataclass(frozen=True, slots=True)
class Damaged:
    """Clients of a worker that serves `TEXT` with `speak`, and the plan of the wire between them and the worker."""

    clients: Sequence[Transport]
    instance: Instance
    plan: FaultPlan


@pytest.mark.asyncio
class DamageChecks:
    """No bit that flips makes an answer another one. Subclass it as ``Test…`` and write the fixture `damaged`."""

    #: Bits that are flipped in the short check and in the long one; and whole answers without which that shows nothing.
    FLIPS: ClassVar[int] = 100
    MANY_FLIPS: ClassVar[int] = 10_000
    LEAST_WHOLE: ClassVar[int] = 100

    @pytest.fixture
    def damaged(self) -> Damaged:
        """Return what is under test. Every author writes this one."""
        raise NotImplementedError("write a fixture `damaged` that yields Damaged(clients, instance, plan)")

    async def test_no_answer_is_another_than_was_sent_though_bits_flip(self, damaged: Damaged) -> None:
        damage = await flip_bits(damaged.clients, damaged.instance, damaged.plan, flips=self.FLIPS, seed=1)

        assert (damage.wrong, damage.hung) == ([], 0)
        assert damage.whole
        assert damage.failed

    @pytest.mark.full
    @pytest.mark.timeout(900)
    async def test_no_answer_is_another_than_was_sent_though_many_bits_flip(self, damaged: Damaged) -> None:
        damage = await flip_bits(damaged.clients, damaged.instance, damaged.plan, flips=self.MANY_FLIPS, seed=1)

        assert (damage.wrong, damage.hung) == ([], 0)
        assert damage.whole > self.LEAST_WHOLE


async def _ask(client: Transport, there: Instance, seed: int, damage: Damage) -> None:
    asked, sink = prompt(seed), Recorder(WAIT)
    source: Source | None = None
    try:
        async with asyncio.timeout(WAIT):
            source = await client.call(there, TEXT, asked, EngineContext(f"request-{seed}"), sink)
            await sink.end()
        error = sink.outcome()
    except DynamoError as failure:
        error = failure
    except (TimeoutError, AssertionError):
        damage.hung += 1
        error = Disconnected("it had no end")
    finally:
        if source is not None:
            await source.aclose()
    tokens = [token for item in sink.items for token in item.token_ids]
    expected = answer(asked)
    if tokens != expected[: len(tokens)] or (error is None and len(tokens) != len(expected)):
        damage.wrong.append(f"seed {seed}: {len(tokens)} tokens, ended with {error!r}")
    if error is None:
        damage.whole += 1
    else:
        damage.failed += 1
        await asyncio.sleep(PAUSE)
