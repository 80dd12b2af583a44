"""Log-probabilities of a long answer in packed arrays, at a tenth of the memory of their JSON."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from dynamo_core import TopLogprob

from dynamo_generation.choices.logprob_buffer import Scored

#: Scores that are unpacked at once: a fraction of a millisecond of work.
_SLICE = 512


class PackedLogprobs:
    """The scores of many tokens of one choice, in order."""

    __slots__ = ("_counts", "_log_probs", "_offsets", "_token_ids", "_top_ids", "_top_log_probs")

    def __init__(self) -> None:
        self._token_ids, self._offsets = array("q"), array("q")
        self._log_probs = array("d")
        #: How many alternatives each token has, and those of all tokens in a row.
        self._counts = array("q")
        self._top_ids, self._top_log_probs = array("q"), array("d")

    def add(self, scored: Scored) -> int:
        """Add the scores of some more tokens; return the bytes that they take."""
        self._token_ids.extend(scored.token_ids)
        self._log_probs.extend(scored.log_probs)
        self._offsets.extend(scored.offsets)
        self._counts.extend(map(len, scored.top_logprobs))
        tops = [top for each in scored.top_logprobs for top in each]
        self._top_ids.extend([top.token_id for top in tops])
        self._top_log_probs.extend([top.logprob for top in tops])
        return 32 * len(scored.token_ids) + 16 * len(tops)

    def slices(self) -> Iterator[Scored]:
        """Yield all scores, a few tokens at a time."""
        begin, top = 0, 0
        while begin < len(self._token_ids):
            end, tops, left = begin, list[Sequence[TopLogprob]](), _SLICE
            while end < len(self._token_ids) and left > 0:
                count = self._counts[end]
                pairs = zip(self._top_ids[top : top + count], self._top_log_probs[top : top + count], strict=True)
                tops.append([TopLogprob(token_id, logprob) for token_id, logprob in pairs])
                top += count
                left -= 1 + count
                end += 1
            yield Scored(self._token_ids[begin:end], self._log_probs[begin:end], tops, self._offsets[begin:end])
            begin = end
