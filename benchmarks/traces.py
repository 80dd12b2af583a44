"""Made-up traffic for measuring routers: who asks when, with which prompts. Pure: the same seed is the same trace.

Chats begin at random times, independently of each other (a Poisson process); within a chat the next question comes some
seconds after the last answer, as people do. Token ids are random numbers; what two prompts share they share on purpose.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

#: Token ids are below this.
VOCABULARY: Final = 32_000


@dataclass(frozen=True, slots=True)
class Turn:
    """One question: its own tokens, how many the answer has, and seconds since the answer before it."""

    question: Sequence[int]
    answer: int
    pause: float


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation. Every prompt of it begins with the opening, and holds all that was said before."""

    begins: float
    opening: Sequence[int]
    turns: Sequence[Turn]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a trace is made of. Ranges are inclusive; within them every value has the same chance."""

    #: Chats in all, and per second.
    chats: int
    rate: float
    #: Applications, each with a system prompt of its own that all its chats begin with. The chance of the n-th is
    #: proportional to ``1 / n ** skew``. With no application nothing is shared.
    applications: int = 0
    skew: float = 1.0
    system_tokens: tuple[int, int] = (1000, 4000)
    #: Questions of a chat at most; after each, another one follows with this chance.
    most_turns: int = 1
    further: float = 0.0
    question_tokens: tuple[int, int] = (20, 300)
    answer_tokens: tuple[int, int] = (10, 60)
    #: Mean seconds between an answer and the next question, exponentially distributed.
    pause: float = 5.0


#: Chats of several turns with applications whose system prompts some use often and most seldom.
SHARED: Final = Traffic(
    chats=400, rate=12.0, applications=64, system_tokens=(4000, 12_000), most_turns=10, further=0.75
)
#: Single questions that have nothing in common.
UNSHARED: Final = Traffic(chats=800, rate=32.0, question_tokens=(200, 6000))


def make_trace(traffic: Traffic, seed: int) -> list[Chat]:
    """Return the chats in the order in which they begin."""
    draw = random.Random(seed)
    systems = [_tokens(draw, draw.randint(*traffic.system_tokens)) for _ in range(traffic.applications)]
    popularity = list(accumulate((number + 1) ** -traffic.skew for number in range(traffic.applications)))
    now = 0.0
    chats = []
    for _ in range(traffic.chats):
        now += draw.expovariate(traffic.rate)
        opening = draw.choices(systems, cum_weights=popularity)[0] if systems else ()
        turns = [_turn(draw, traffic, 0.0)]
        while len(turns) < traffic.most_turns and draw.random() < traffic.further:
            turns.append(_turn(draw, traffic, draw.expovariate(1 / traffic.pause)))
        chats.append(Chat(now, opening, turns))
    return chats


def _turn(draw: random.Random, traffic: Traffic, pause: float) -> Turn:
    question = _tokens(draw, draw.randint(*traffic.question_tokens))
    return Turn(question, draw.randint(*traffic.answer_tokens), pause)


def _tokens(draw: random.Random, count: int) -> list[int]:
    return draw.choices(range(VOCABULARY), k=count)
