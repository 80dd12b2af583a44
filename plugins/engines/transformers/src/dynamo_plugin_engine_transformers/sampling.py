"""Choosing the next token of every request of a step, on the model's device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamo_core import TopLogprob

from dynamo_plugin_engine_transformers.wish import Wish

#: Mixes a seed with a position; any odd number with its bits well spread does.
_SPREAD = 0x9E3779B97F4A7C15
_MASK = (1 << 63) - 1


def choose(torch: Any, scores: Any, wishes: Sequence[Wish]) -> Any:
    """Chooses a token per row; `scores` is a float tensor, rows by vocabulary, one row per wish.

    Returns the scores with the chosen token of every row as the greatest. Each wish is told its token.
    """
    told = _log_probabilities(torch, scores, wishes)
    for row, wish in enumerate(wishes):
        _adjust(torch, scores[row], wish)
    drawn = [row for row, wish in enumerate(wishes) if wish.temperature > 0]
    if drawn:
        index = torch.tensor(drawn, device=scores.device)
        some = [wishes[row] for row in drawn]
        picked = _draw(torch, scores[index], some)
        scores[index, picked] = float("inf")
    tokens: list[int] = scores.argmax(dim=-1).tolist()
    for row, (wish, token) in enumerate(zip(wishes, tokens, strict=True)):
        wish.produced.append(token)
        if row in told:
            _tell(torch, told[row], wish, token)
    return scores


def _log_probabilities(torch: Any, scores: Any, wishes: Sequence[Wish]) -> dict[int, Any]:
    """Of the rows that want them, before anything changes what the model said."""
    rows = [row for row, wish in enumerate(wishes) if wish.logprobs is not None]
    if not rows:
        return {}
    made = torch.log_softmax(scores[torch.tensor(rows, device=scores.device)], dim=-1)
    return dict(zip(rows, made, strict=True))


def _tell(torch: Any, log_probs: Any, wish: Wish, token: int) -> None:
    value = log_probs[token]
    wish.log_probs.append(float(value))
    most: list[TopLogprob] = []
    if wish.logprobs:
        values, ids = torch.topk(log_probs, min(wish.logprobs, log_probs.shape[-1]))
        pairs = zip(ids.tolist(), values.tolist(), strict=True)
        most = [TopLogprob(known, score, rank) for rank, (known, score) in enumerate(pairs, start=1)]
    wish.top_logprobs.append(most)


def _adjust(torch: Any, row: Any, wish: Wish) -> None:
    """Penalties, biases and bans, in place."""
    if wish.penalized:
        _penalize(torch, row, wish)
    for token, amount in wish.bias.items():
        row[token] += amount
    if wish.allowed is not None:
        kept = torch.tensor(list(wish.allowed), device=row.device)
        values = row[kept].clone()
        row.fill_(float("-inf"))
        row[kept] = values
    if wish.bad_words or wish.min_tokens > len(wish.produced):
        banned = [token for token in wish.banned() if token < row.shape[-1]]
        if banned:
            row[torch.tensor(banned, device=row.device)] = float("-inf")


def _penalize(torch: Any, row: Any, wish: Wish) -> None:
    if wish.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*wish.prompt, *wish.produced}), device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / wish.repetition_penalty, values * wish.repetition_penalty)
    if wish.produced and (wish.presence_penalty or wish.frequency_penalty):
        tokens, counts = torch.tensor(wish.produced, device=row.device).unique(return_counts=True)
        row[tokens] -= wish.frequency_penalty * counts + wish.presence_penalty


def _draw(torch: Any, scores: Any, wishes: Sequence[Wish]) -> Any:
    """A token per row, by chance."""

    def column(values: Sequence[float]) -> Any:
        return torch.tensor(values, dtype=scores.dtype, device=scores.device).unsqueeze(-1)

    scores = scores / column([wish.temperature for wish in wishes])
    if any(wish.min_p > 0 for wish in wishes):
        least = torch.log(column([max(wish.min_p, 1e-30) for wish in wishes]))
        scores = scores.masked_fill(scores < scores.max(dim=-1, keepdim=True).values + least, float("-inf"))
    if any(wish.top_k > 0 or wish.top_p < 1 for wish in wishes):
        scores = _cut(torch, scores, wishes, column)
    # The greatest of the scores, each with noise of this kind, is a draw from their softmax.
    return (scores + _noise(torch, scores, wishes)).argmax(dim=-1)


def _cut(torch: Any, scores: Any, wishes: Sequence[Wish], column: Any) -> Any:
    """Only the `top_k` best, and of those only as many as make up `top_p`."""
    size = scores.shape[-1]
    ordered, ids = scores.sort(dim=-1, descending=True)
    places = torch.arange(size, device=scores.device)
    limits = column([float(wish.top_k or size) for wish in wishes])
    ordered = ordered.masked_fill(places >= limits, float("-inf"))
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    # The best always stays, whatever is asked for.
    out = (before >= column([wish.top_p for wish in wishes])) & (places > 0)
    ordered = ordered.masked_fill(out, float("-inf"))
    return torch.empty_like(scores).scatter_(-1, ids, ordered)


def _noise(torch: Any, scores: Any, wishes: Sequence[Wish]) -> Any:
    """Standard Gumbel noise. With a seed, that of a position is always the same."""
    uniform = torch.rand(scores.shape, device=scores.device, dtype=scores.dtype)
    for row, wish in enumerate(wishes):
        if wish.seed is not None:
            generator = torch.Generator(device=scores.device)
            position = len(wish.prompt) + len(wish.produced)
            generator.manual_seed(((wish.seed + 1) * _SPREAD + position * 0xBF58476D1CE4E5B9) & _MASK)
            uniform[row] = torch.rand(scores.shape[-1], device=scores.device, dtype=scores.dtype, generator=generator)
    tiny = torch.finfo(scores.dtype).tiny
    return -torch.log(-torch.log(uniform.clamp_(min=tiny, max=1 - 1e-7)))
