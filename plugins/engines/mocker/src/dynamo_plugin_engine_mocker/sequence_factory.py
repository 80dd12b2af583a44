"""From a request to the sequence that answers it."""

from __future__ import annotations

from dynamo_core import PreprocessedRequest, Tokenizer

from dynamo_plugin_engine_mocker.config import MockerConfig
from dynamo_plugin_engine_mocker.sequence import Sequence, StopTokens
from dynamo_plugin_engine_mocker.tokens.noise import seed_of
from dynamo_plugin_engine_mocker.tokens.token_sources import FixedSource, RandomSource
from dynamo_plugin_engine_mocker.tokens.vocabulary import Vocabulary

_NONE: frozenset[int] = frozenset()


class SequenceFactory:
    """Makes a sequence for each request, according to the settings and the model's tokenizer."""

    def __init__(self, settings: MockerConfig, tokenizer: Tokenizer, *, longest: int | None = None) -> None:
        """Bound answers by `longest` tokens, whatever is asked for; None: no such bound."""
        self._settings = settings
        self.tokenizer = tokenizer
        # The last token of an answer is not computed, so that it needs no place in the KV cache.
        self._most_tokens = min(settings.context_length, settings.num_gpu_blocks * settings.block_size + 1)
        self._longest = self._most_tokens if longest is None else longest
        self._vocabulary = Vocabulary.of(tokenizer, printable=settings.printable)
        self._script = [(entry, tokenizer.encode(entry.text, add_special_tokens=False)) for entry in settings.script]

    @classmethod
    def load(cls, settings: MockerConfig, model_path: str | None, longest: int | None = None) -> SequenceFactory:
        """Load the tokenizer of a model folder, or the byte tokenizer. Blocks: call it in a thread."""
        return cls(settings, _tokenizer(model_path), longest=longest)

    def sequence(self, request: PreprocessedRequest) -> Sequence:
        """Return the answer to a request whose prompt fits into the KV cache and leaves room in the context."""
        prompt = request.token_ids
        stops = _stop_tokens(request)
        seed = seed_of(request.sampling_options.seed)
        room = min(self._most_tokens - len(prompt), self._longest)
        fixed = self._fixed(prompt)
        source: FixedSource | RandomSource
        if fixed is not None:
            source = FixedSource(fixed)
            default = room
        else:
            source = RandomSource(
                self._vocabulary, seed, len(prompt), excluded=stops.all, free_from=len(prompt) + stops.from_count
            )
            default = self._settings.default_max_tokens
        asked = request.stop_conditions.max_tokens
        return Sequence(
            source,
            prompt_tokens=len(prompt),
            limit=min(default if asked is None else asked, room),
            stops=stops,
            vocabulary=self._vocabulary,
            seed=seed,
            alternatives=request.output_options.logprobs,
            chunks=self._settings.chunks,
        )

    def _fixed(self, prompt: list[int]) -> list[int] | None:
        """Return the whole answer where it does not depend on chance."""
        if self._settings.output == "echo":
            return prompt
        if self._script:
            text = self.tokenizer.decode(prompt, skip_special_tokens=False)
            for entry, tokens in self._script:
                if entry.fits(text):
                    return tokens
        return None


def _stop_tokens(request: PreprocessedRequest) -> StopTokens:
    conditions = request.stop_conditions
    if conditions.ignore_eos:
        # Clears every stop id, as `StopConditions.apply_ignore_eos` does.
        return StopTokens(ends=_NONE, hidden=_NONE, visible=_NONE, from_count=0)
    return StopTokens(
        ends=frozenset(request.eos_token_ids),
        hidden=frozenset(conditions.stop_token_ids_hidden or ()),
        visible=frozenset(conditions.stop_token_ids or ()),
        from_count=max(conditions.min_tokens or 0, 0),
    )


def _tokenizer(model_path: str | None) -> Tokenizer:
    if model_path is None:
        from dynamo_text import ByteTokenizer

        return ByteTokenizer()
    from dynamo_core import load_folder
    from dynamo_text import load_tokenizer

    return load_tokenizer("hf", load_folder(model_path))
