"""Made-up log-probabilities, consistent and replayable."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import log

from dynamo_core import TopLogprob

from dynamo_plugin_engine_mocker.tokens.noise import BLOCK, WORD, noise
from dynamo_plugin_engine_mocker.tokens.vocabulary import Vocabulary

# Neighbouring tokens of a request share a block, and most requests share the seed 0.
_words = lru_cache(maxsize=256)(noise)

#: More alternatives than this are not given: each is half as likely as the one before, and a float ends somewhere.
MAX_ALTERNATIVES = 256


def logprobs(
    vocabulary: Vocabulary, seed: int, position: int, token_ids: Sequence[int], alternatives: int
) -> tuple[list[float], list[list[TopLogprob]]]:
    """Return the log-probability of each token, from absolute position `position` on.

    It comes with the `alternatives` most likely tokens of the position. The chosen token is the most likely one, with a
    probability of 0.5 to 0.95; each further alternative has half of what is left, so that all together stay below 1.
    There are fewer alternatives where the vocabulary is smaller.
    """
    chosen: list[float] = []
    top: list[list[TopLogprob]] = []
    for place, token in enumerate(token_ids, position):
        block, offset = divmod(place, BLOCK)
        word = _words(b"logprobs", seed, block)[offset]
        probability = 0.5 + 0.45 * word / WORD
        chosen.append(log(probability))
        top.append(_alternatives(vocabulary, token, probability, word, alternatives))
    return chosen, top


def _alternatives(vocabulary: Vocabulary, token: int, probability: float, word: int, wanted: int) -> list[TopLogprob]:
    wanted = min(wanted, MAX_ALTERNATIVES)
    if wanted <= 0:
        return []
    found = [TopLogprob(token, log(probability), 1)]
    left = 1.0 - probability
    ids = vocabulary.ids
    for step in range(len(ids)):
        if len(found) == wanted:
            break
        other = ids[(word + step) % len(ids)]
        if other != token:
            left /= 2
            found.append(TopLogprob(other, log(left), len(found) + 1))
    return found
