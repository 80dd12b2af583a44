"""Hugging Face tokenizers, made from the contents of a model's files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynamo_core import GENERATION_CONFIG, MODEL_CONFIG, SPECIAL_TOKENS, TOKENIZER, TOKENIZER_CONFIG, StreamDecoder
from dynamo_core.errors import ConfigError
from dynamo_core.protocol import Unreadable, read_json, truncated

from dynamo_text.encode_limit import EncodeLimit
from dynamo_text.library_stream import LibraryStream
from dynamo_text.panics import raise_panics
from dynamo_text.piecewise_encoding import PieceEncoder
from dynamo_text.prefix_cache import EncodeJob, TokenCache, TokenCacheStore
from dynamo_text.text_splitter import TextSplitter, affixes, is_deterministic, safe_splitter
from dynamo_text.token_bound import TokenBound, token_bound
from dynamo_text.token_pieces import FirstStream, PieceStream, PieceTable, StripStream, piece_rules

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library


class HFTokenizer:
    """A tokenizer of the library ``tokenizers`` (extra `hf`).

    `files` maps bare file names to contents; ``tokenizer.json`` must be among them, the rest says which ids begin and
    end a sequence. The end-of-sequence ids are those of ``generation_config.json`` and ``config.json``, then the
    tokenizer's own. Truncation and padding that a ``tokenizer.json`` may ask for are switched off. With a `memory`,
    texts that were encoded before are not tokenized again.

    Raises:
        ConfigError: a file is missing or broken, or the extra `hf` is not installed.
    """

    @raise_panics
    def __init__(self, files: Mapping[str, bytes], memory: TokenCacheStore | None = None) -> None:
        library = _parse(files)
        library.no_truncation()
        library.no_padding()
        self._library = library
        vocabulary = library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self._special = frozenset(
            token_id for token_id, token in library.get_added_tokens_decoder().items() if token.special
        )
        decoder = library.decoder
        self._rules = None if decoder is None else piece_rules(json.loads(decoder.__getstate__()))
        self._shown = PieceTable(self._piece)
        self._hidden = PieceTable(self._piece_unless_special)
        #: One for each set of special tokens that is not skipped: as many as there are parsers.
        self._kept: dict[frozenset[int], PieceTable] = {}
        self._first = PieceTable(self._first_piece)
        config = _Config(files)
        self.bos_token_id: int | None = next(config.ids("bos", vocabulary, self.vocab_size), None)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(config.ids("eos", vocabulary, self.vocab_size)))
        #: The least number of tokens of texts, if that is known.
        self.token_bound: TokenBound | None = token_bound(library)
        same = is_deterministic(library)
        splitter = safe_splitter(library) if same else TextSplitter()
        self._pieces = PieceEncoder(self._encode_many, splitter, affixes(library), self.token_bound)
        self._cache = TokenCache(memory, self._pieces) if memory is not None and same else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. Special tokens written out in the text become their ids.

        Raises:
            InvalidArgument: the text holds a lone surrogate.
        """
        return self.encode_within(text, None, add_special_tokens=add_special_tokens)

    def encode_within(self, text: str, limit: EncodeLimit | None, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, of which no more is encoded at once than takes little memory.

        Raises:
            InvalidArgument: the text holds a lone surrogate.
            TextTooLong: it has more tokens than `limit` allows, or cannot be cut.
            EncodingCancelled: the ids are not wanted any more.
        """
        return (self._cache or self._pieces).encode(text, add_special_tokens, limit)

    def beginning(self, text: str, limit: EncodeLimit) -> str:
        """Return the beginning of a text whose first tokens, as many as `limit` allows, are those of the text.

        Raises:
            InvalidArgument: the text holds a lone surrogate.
            TextTooLong: it cannot be cut.
        """
        return self._pieces.beginning(text, limit)

    def begin(self, text: str, *, add_special_tokens: bool = True) -> EncodeJob | None:
        """Return what is known of a text already, and what is left to do; None if nothing is remembered."""
        return None if self._cache is None else self._cache.begin(text, add_special_tokens)

    @raise_panics
    def _encode_many(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        # The batch call is faster, and lets other threads run; `encode` does neither.
        encodings = self._library.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids.

        Bytes that are not UTF-8 become U+FFFD, ids that are not in the vocabulary are left out. Equal to what the
        library gives, except for vocabularies with byte fallback: there the library gives up a whole run of byte tokens
        if one character in it is broken; here each broken character becomes one U+FFFD and the others stay, which is
        what a stream that cannot take text back has to give.
        """
        if self._rules is None:
            wanted = [token_id for token_id in token_ids if 0 <= token_id < self.vocab_size]
            return raise_panics(self._library.decode)(wanted, skip_special_tokens=skip_special_tokens)
        stream = self.stream(skip_special_tokens=skip_special_tokens)
        return stream.step(token_ids) + stream.flush()

    def stream(self, *, skip_special_tokens: bool = True, keep: frozenset[int] = frozenset()) -> StreamDecoder:
        """Return a decoder for one stream of output. Special tokens in `keep` are never skipped."""
        rules = self._rules
        if rules is None:
            if not skip_special_tokens:
                return LibraryStream(self._library, self._is_known)
            return LibraryStream(self._library, lambda token_id: self._is_text(token_id) or token_id in keep)
        table = self._hidden if skip_special_tokens else self._shown
        if skip_special_tokens and keep:
            table = self._keeping(keep)
        if rules.first_to_bytes is not None:
            return FirstStream(table, self._first)
        if rules.strip_count:
            return StripStream(table, rules.strip, rules.strip_count)
        return PieceStream(table)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for, special ones included.

        Empty if the id is not in the vocabulary.
        """
        if self._rules is not None:
            return self._shown[token_id]
        if not self._is_known(token_id):
            return b""
        return raise_panics(self._library.decode)([token_id], skip_special_tokens=False).encode()

    def _is_known(self, token_id: int) -> bool:
        return 0 <= token_id < self.vocab_size

    def _is_text(self, token_id: int) -> bool:
        return 0 <= token_id < self.vocab_size and token_id not in self._special

    def _token(self, token_id: int) -> str | None:
        # The library raises for what is not an unsigned number of 32 bits.
        return self._library.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def _piece(self, token_id: int) -> bytes | None:
        token = self._token(token_id)
        return None if token is None or self._rules is None else self._rules.to_bytes(token)

    def _first_piece(self, token_id: int) -> bytes | None:
        token = self._token(token_id)
        if token is None or self._rules is None or self._rules.first_to_bytes is None:
            return None
        return self._rules.first_to_bytes(token)

    def _keeping(self, keep: frozenset[int]) -> PieceTable:
        table = self._kept.get(keep)
        if table is None:
            truncated, hidden = self._shown, self._hidden
            table = self._kept[keep] = PieceTable(
                # None is not kept: there is no end of ids that do not exist.
                lambda token_id: (truncated if token_id in keep else hidden)[token_id] or None
            )
        return table

    def _piece_unless_special(self, token_id: int) -> bytes | None:
        return b"" if token_id in self._special else self._piece(token_id)


class _Config:
    """The special tokens by the files beside ``tokenizer.json``."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        model = _json(files, MODEL_CONFIG)
        self._by_id = [_json(files, GENERATION_CONFIG), model]
        text_config = model.get("text_config")  # models that also see or hear keep it there
        if isinstance(text_config, dict):
            self._by_id.append(text_config)
        self._by_name = [_json(files, TOKENIZER_CONFIG), _json(files, SPECIAL_TOKENS)]

    def ids(self, role: str, vocabulary: Mapping[str, int], vocab_size: int) -> Iterator[int]:
        """Yield the ids of a role, "bos" or "eos", most trusted first; what is not in the vocabulary is left out."""
        for config in self._by_id:
            value = config.get(f"{role}_token_id")
            for token_id in value if isinstance(value, list) else [value]:
                if type(token_id) is int and 0 <= token_id < vocab_size:
                    yield token_id
        for config in self._by_name:
            token = config.get(f"{role}_token")
            if isinstance(token, dict):
                token = token.get("content")
            if isinstance(token, str) and token in vocabulary:
                yield vocabulary[token]


def _parse(files: Mapping[str, bytes]) -> Library:
    # One text is encoded at a time, so the library's own threads would have nothing to do.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from tokenizers import Tokenizer as Library
    except ImportError as error:
        raise ConfigError(
            "a model with tokenizer files needs the library tokenizers; pip install 'dynamo-text[hf]'", cause=error
        ) from error
    data = files.get(TOKENIZER)
    if data is None:
        raise ConfigError(f"the model has no {TOKENIZER}; export its fast tokenizer (save_pretrained writes the file)")
    try:
        return raise_panics(Library.from_buffer)(data)
    except Exception as error:  # the library raises bare exceptions
        raise ConfigError(
            f"{TOKENIZER} cannot be read: {truncated(str(error))}; export the tokenizer again, or update tokenizers",
            cause=error,
        ) from error


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    data = files.get(name)
    if data is None:
        return {}
    try:
        value = read_json(data)
    except Unreadable as error:
        raise ConfigError(f"{name} is not JSON: {error}; mend the file or take it away", cause=error) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must hold a JSON object; mend the file or take it away")
    return value
