"""Detokenizing a stream of token ids: decoding and stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_core import StreamDecoder

from dynamo_text.stop_strings import StopMatcher, StopStrings


class Detokenizer:
    """Decodes one stream and ends it at a stop string.

    Text is given as soon as it is certain: held back are incomplete characters, and the longest end of the text that is
    the beginning of a stop string. The text is cut before the stop string, with `include_stop` after it; from then on
    nothing is given. Stop strings that several streams have in common are better compiled once.

    Raises:
        InvalidArgument: a stop string is empty.
    """

    __slots__ = ("_decoder", "_matcher", "_step", "stop_token_index")

    def __init__(
        self, decoder: StreamDecoder, stop: Sequence[str] | StopStrings | None = (), include_stop: bool = False
    ) -> None:
        self._decoder = decoder
        self._step = decoder.step
        if not isinstance(stop, StopStrings):
            stop = StopStrings(stop) if stop else None
        self._matcher = None if stop is None else StopMatcher(stop, include_stop=include_stop)
        #: Once stopped: how many tokens of the `feed` that found the stop string were used, the one that completed it
        #: included. 0 if `finish` found it.
        self.stop_token_index = 0

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return None if self._matcher is None else self._matcher.found

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens make certain; may be empty."""
        matcher = self._matcher
        if matcher is None:
            return self._step(token_ids)
        if self.stopped is not None:
            return ""
        # One by one, so that it is known which token completed a stop string.
        step, push = self._step, matcher.push
        texts: list[str] = []
        for index, token_id in enumerate(token_ids, start=1):
            text = step((token_id,))
            if text:
                texts.append(push(text))
                if matcher.found is not None:
                    self.stop_token_index = index
                    break
        return "".join(texts)

    def finish(self) -> str:
        """Return what is left at the end of the stream."""
        matcher = self._matcher
        if matcher is None:
            return self._decoder.flush()
        if matcher.found is not None:
            return ""
        text = matcher.push(self._decoder.flush())
        return text + matcher.finish()
