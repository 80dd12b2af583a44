"""Choosing the next token of every request of a step, on the model's device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamo_core import TopLogprob

from dynamo_plugin_engine_transformers.request_sampling import RequestSampling

#: Mixes a seed with a position; any odd number with its bits well spread does.
_SPREAD = 0x9E3779B97F4A7C15
_MASK = (1 << 63) - 1


def sample(torch: Any, scores: Any, samplings: Sequence[RequestSampling]) -> Any:
    """Choose a token per row; `scores` is a float tensor, rows by vocabulary, one row per request.

    Return the scores with the chosen token of every row as the greatest. Each `RequestSampling` records its token.
    """
    log_probs_by_row = _log_probabilities(torch, scores, samplings)
    for row, sampling in enumerate(samplings):
        _adjust(torch, scores[row], sampling)
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if drawn:
        index = torch.tensor(drawn, device=scores.device)
        some = [samplings[row] for row in drawn]
        picked = _draw(torch, scores[index], some)
        scores[index, picked] = float("inf")
    tokens: list[int] = scores.argmax(dim=-1).tolist()
    for row, (sampling, token) in enumerate(zip(samplings, tokens, strict=True)):
        sampling.produced.append(token)
        if row in log_probs_by_row:
            _record_logprobs(torch, log_probs_by_row[row], sampling, token)
    return scores


def _log_probabilities(torch: Any, scores: Any, samplings: Sequence[RequestSampling]) -> dict[int, Any]:
    """Return those of the rows that want them, before anything changes the logits of the model."""
    rows = [row for row, sampling in enumerate(samplings) if sampling.logprobs is not None]
    if not rows:
        return {}
    made = torch.log_softmax(scores[torch.tensor(rows, device=scores.device)], dim=-1)
    return dict(zip(rows, made, strict=True))


def _record_logprobs(torch: Any, log_probs: Any, sampling: RequestSampling, token: int) -> None:
    value = log_probs[token]
    sampling.log_probs.append(float(value))
    most: list[TopLogprob] = []
    if sampling.logprobs:
        values, ids = torch.topk(log_probs, min(sampling.logprobs, log_probs.shape[-1]))
        pairs = zip(ids.tolist(), values.tolist(), strict=True)
        most = [TopLogprob(known, score, rank) for rank, (known, score) in enumerate(pairs, start=1)]
    sampling.top_logprobs.append(most)


def _adjust(torch: Any, row: Any, sampling: RequestSampling) -> None:
    """Apply penalties, biases and bans, in place."""
    if sampling.penalized:
        _penalize(torch, row, sampling)
    for token, amount in sampling.bias.items():
        row[token] += amount
    if sampling.allowed is not None:
        kept = torch.tensor(list(sampling.allowed), device=row.device)
        values = row[kept].clone()
        row.fill_(float("-inf"))
        row[kept] = values
    if sampling.bad_words or sampling.min_tokens > len(sampling.produced):
        banned = [token for token in sampling.banned() if token < row.shape[-1]]
        if banned:
            row[torch.tensor(banned, device=row.device)] = float("-inf")


def _penalize(torch: Any, row: Any, sampling: RequestSampling) -> None:
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*sampling.prompt, *sampling.produced}), device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    if sampling.produced and (sampling.presence_penalty or sampling.frequency_penalty):
        tokens, counts = torch.tensor(sampling.produced, device=row.device).unique(return_counts=True)
        row[tokens] -= sampling.frequency_penalty * counts + sampling.presence_penalty


def _draw(torch: Any, scores: Any, samplings: Sequence[RequestSampling]) -> Any:
    """Return a token per row, by chance."""

    def column(values: Sequence[float]) -> Any:
        return torch.tensor(values, dtype=scores.dtype, device=scores.device).unsqueeze(-1)

    scores = scores / column([sampling.temperature for sampling in samplings])
    if any(sampling.min_p > 0 for sampling in samplings):
        least = torch.log(column([max(sampling.min_p, 1e-30) for sampling in samplings]))
        scores = scores.masked_fill(scores < scores.max(dim=-1, keepdim=True).values + least, float("-inf"))
    if any(sampling.top_k > 0 or sampling.top_p < 1 for sampling in samplings):
        scores = _truncate(torch, scores, samplings, column)
    # The greatest of the scores, each with noise of this kind, is a draw from their softmax.
    return (scores + _noise(torch, scores, samplings)).argmax(dim=-1)


def _truncate(torch: Any, scores: Any, samplings: Sequence[RequestSampling], column: Any) -> Any:
    """Return only the `top_k` best, and of those only as many as make up `top_p`."""
    size = scores.shape[-1]
    ordered, ids = scores.sort(dim=-1, descending=True)
    places = torch.arange(size, device=scores.device)
    limits = column([float(sampling.top_k or size) for sampling in samplings])
    ordered = ordered.masked_fill(places >= limits, float("-inf"))
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    # The best always stays, whatever is asked for.
    out = (before >= column([sampling.top_p for sampling in samplings])) & (places > 0)
    ordered = ordered.masked_fill(out, float("-inf"))
    return torch.empty_like(scores).scatter_(-1, ids, ordered)


def _noise(torch: Any, scores: Any, samplings: Sequence[RequestSampling]) -> Any:
    """Return standard Gumbel noise. With a seed, that of a position is always the same."""
    uniform = torch.rand(scores.shape, device=scores.device, dtype=scores.dtype)
    for row, sampling in enumerate(samplings):
        if sampling.seed is not None:
            generator = torch.Generator(device=scores.device)
            position = len(sampling.prompt) + len(sampling.produced)
            generator.manual_seed(((sampling.seed + 1) * _SPREAD + position * 0xBF58476D1CE4E5B9) & _MASK)
            uniform[row] = torch.rand(scores.shape[-1], device=scores.device, dtype=scores.dtype, generator=generator)
    tiny = torch.finfo(scores.dtype).tiny
    return -torch.log(-torch.log(uniform.clamp_(min=tiny, max=1 - 1e-7)))
