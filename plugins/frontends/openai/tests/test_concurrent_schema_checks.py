"""The checks of answers against schemas: those of one client do not wait for long ones of another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from dynamo_core import ContentDelta, Principal
from dynamo_generation.choices.choice import Choice
from dynamo_generation.choices.schema_check import SchemaChecker
from dynamo_generation.choices.schema_validation import CollectedAnswer, Verdict

#: Its regular expression looks at every way to split the letters.
SLOW = ('"' + "a" * 40 + '!"', {"type": "string", "pattern": "^(a+)+$"})
PLAIN = ('"a"', {"type": "string"})


def ended(text: str, schema: dict[str, Any]) -> Choice:
    """Return a choice that has ended, with a text that is to be as a schema says."""
    choice = Choice(0)
    choice.answered = CollectedAnswer(schema, {})
    choice.answered.add([ContentDelta(text)])
    choice.finish_reason = "stop"
    return choice


@pytest.fixture
def checker(server: Any) -> SchemaChecker:
    checker: SchemaChecker = server.generation._checker
    return checker


async def verdict_of(checker: SchemaChecker, principal: Principal, claim: tuple[str, dict[str, Any]]) -> Verdict | None:
    choice = ended(*claim)
    check = checker.of([choice], "m", principal)
    assert check is not None
    await check()
    return choice.verdict


@pytest.mark.parametrize("keys", [("ann", "bob"), ("", "")], ids=["clients with keys", "clients without keys"])
async def test_a_check_does_not_wait_for_long_ones_of_others(checker: SchemaChecker, keys: Sequence[str]) -> None:
    attacker, other = (Principal(key_id=key) for key in keys)
    done: list[str] = []

    async def check(principal: Principal, claim: tuple[str, dict[str, Any]], name: str) -> Verdict | None:
        verdict = await verdict_of(checker, principal, claim)
        done.append(name)
        return verdict

    # Both processes have started.
    await asyncio.gather(*(verdict_of(checker, principal, PLAIN) for principal in (attacker, other)))

    async with asyncio.TaskGroup() as group:
        slow = [group.create_task(check(attacker, SLOW, "slow")) for _ in range(3)]
        await asyncio.sleep(0)
        plain = group.create_task(check(other, PLAIN, "plain"))

    assert done[0] == "plain"
    assert plain.result() is None
    assert [task.result() for task in slow] == [Verdict(None, "it took too long to check")] * 3
