"""Scores: the share of a query's words that a document has."""

from __future__ import annotations

import re

from dynamo_core import BackendError, ScoreOutput, ScoreRequest, Tokenizer

_WORD = re.compile(r"\w+")


def share_of_words(query: str, document: str) -> float:
    """Return a share from 0 to 1; the words of a text are counted once, in any case."""
    wanted = _words(query)
    return len(wanted & _words(document)) / len(wanted) if wanted else 0.0


def scores(request: ScoreRequest, tokenizer: Tokenizer, context_length: int) -> ScoreOutput:
    """Return the score of each document. A pair counts as one input of the model: the query before the document.

    Raises:
        BackendError.InvalidArgument: a pair does not fit into the context, and is not to be cut.
    """
    most = request.truncate_prompt_tokens
    if most is not None:
        most = context_length if most < 0 else min(most, context_length)
    made, tokens = [], 0
    for index, (query, document) in enumerate(request.pairs):
        query, used = _cut(tokenizer, query, request.max_tokens_per_query)
        document, length = _cut(tokenizer, document, request.max_tokens_per_doc)
        if most is not None and used + length > most:
            query, used = _cut(tokenizer, query, most)
            document, length = _cut(tokenizer, document, most - used)
        if used + length > context_length:
            raise BackendError.InvalidArgument(
                f"document {index} and its query have {used + length} tokens, more than the model's context length of "
                f"{context_length}"
            )
        made.append(share_of_words(query, document))
        tokens += used + length
    return ScoreOutput(scores=made, prompt_tokens=tokens)


def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text.casefold()))


def _cut(tokenizer: Tokenizer, text: str, most: int | None) -> tuple[str, int]:
    """Return the text, cut to so many tokens, and how many it has."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if most is None or len(token_ids) <= most:
        return text, len(token_ids)
    return tokenizer.decode(token_ids[:most]), most
