"""Whether a whole answer can be as large as its request allows for."""

from __future__ import annotations

from dynamo_generation.requests.chat import ChatRequest
from dynamo_generation.requests.completions import CompletionRequest
from dynamo_generation.requests.generation_request import invalid

_MB = 1024 * 1024
#: The fewest bytes that a token takes with its log-probability, and that each alternative to it takes, in JSON.
_CHAT = (len('{"token":"","logprob":0.0,"bytes":[],"top_logprobs":[]},'), len('{"token":"","logprob":0.0,"bytes":[]},'))
_COMPLETION = (len('"",0.0,{},0,'), len('"":0.0,'))


def check_answer_size(request: ChatRequest | CompletionRequest, tokens: int, most: int) -> None:
    """Check a request for a whole answer with log-probabilities, whose engines may make so many tokens in all.

    `most` is in bytes. Without log-probabilities nothing is refused: text is short for what it costs to make.

    Raises:
        InvalidArgument: the answer would not fit if it had all the tokens that it may have.
    """
    if isinstance(request, ChatRequest):
        alternatives, (token, alternative) = request.alternatives, _CHAT
        limit = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        count, scores = "n", "top_logprobs"
    else:
        alternatives, (token, alternative) = request.logprobs, _COMPLETION
        limit, count, scores = "max_tokens", "n" if request.best_of is None else "best_of", "logprobs"
    if alternatives is None:
        return
    size = tokens * (token + alternatives * alternative)
    if size > most:
        raise invalid(
            f"With `{limit}`, `{count}` and `{scores}` as they are, the answer may have {tokens} tokens with "
            f"{alternatives} alternatives each: {size // _MB} MB or more, and whole answers have at most {most // _MB} "
            "MB. Lower one of them, or set `stream`",
            limit,
        )
