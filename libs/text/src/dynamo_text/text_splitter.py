"""Safe cut points of a text: the ids of the parts, joined, are the ids of the whole.

A tokenizer of the library works in steps: it takes out added tokens, normalizes each piece between them, cuts the
pieces into words (pre-tokenizer), and turns each word into ids (model) without looking at its neighbours. Two kinds of
places are safe, and both can be told from the characters around them:

- Before an *anchor*: an added token that is looked for in the text as it is, wherever it stands. No other such token
  holds it or overlaps it, so each of its occurrences is taken; it takes no spaces with it; and it begins and ends with
  a mark that is neither a letter nor a space, so that tokens beside it do not care. No step looks over such a token,
  except to ask whether a piece is the first of the text. A part that begins with an anchor has it in front as the
  whole text has, so the answer is the same.
- Before a space between two letters a to z (``one| two``), if every step is of a kind that is known to do the same on
  both sides whether the other side is there or not: normalizers that change each character alone (a letter and a
  space never combine), a pre-tokenizer that begins a word at such a space, and none that adds something where a part
  begins with a space. If the pre-tokenizer does not begin a word there, no token of the vocabulary may hold a letter
  with the space after it: a merge over that place would make one.

Tokenizers with a step that is not known have anchors only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dynamo_text.encode_limit import TextTooLong
from dynamo_text.split_pattern import ends_words

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Library

#: Characters of a piece, at least. More means fewer look-ups, less means that less is tokenized again after a change.
PIECE = 512
#: How many anchors are looked for. A tokenizer may have thousands of spare tokens.
MAX_ANCHORS = 64
#: Characters that are searched in one go.
_WINDOW = 1 << 16
#: The most bytes of a character.
_CHARACTER = 4

_WORD = r"(?<=[a-z]) (?=[a-z])"
_OVER_A_WORD_END = re.compile(r"[a-zA-Z][ ▁]")
#: The character that a space becomes in vocabularies of the SentencePiece family, and in byte-level ones.
_BLOCK = "▁"
_BYTE_SPACE = "Ġ"


class TextSplitter:
    """Cuts texts of one tokenizer. Where it cuts depends on the text before the cut and two characters after it."""

    def __init__(self, anchors: Iterable[str] = (), *, words: bool = False, drop_space: bool = False) -> None:
        anchors = list(anchors)
        places = [re.escape(anchor) for anchor in anchors]
        if words:
            places.append(_WORD)
        self._next = re.compile("|".join(places)).search if places else None
        self._drop_space = drop_space
        #: The most characters that have to be seen to know a place.
        self._seen = max([2, *map(len, anchors)])
        #: Characters from one cut to the place from which on the next is looked for.
        self.piece = PIECE

    def __bool__(self) -> bool:
        return self._next is not None

    def pieces(self, text: str) -> list[str]:
        """Return the parts of a text, each about `piece` characters long or longer; one if it cannot be cut."""
        return [text[start:end] for start, end in self.spans(text)]

    def spans(self, text: str, longest: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield where the parts of a text begin and end.

        Raises:
            TextTooLong: a part has more than `longest` bytes.
        """
        start: int = 0
        while True:
            at = self._cut(text, start, None if longest is None else start + longest)
            end = len(text) if at is None else at
            if longest is not None and _more_bytes(text, start, end, longest):
                raise TextTooLong(None)
            yield start, end
            if at is None:
                return
            # A tokenizer that puts a space before every piece makes up for the one that is left out.
            start = at + 1 if self._drop_space and text[at] == " " else at

    def _cut(self, text: str, start: int, stop: int | None) -> int | None:
        """Return the first place after a part that begins at `start`; None if there is none up to `stop`."""
        search = self._next
        end = len(text) if stop is None else min(stop, len(text))
        at = start + self.piece
        # A search keeps other threads waiting.
        while search is not None and at < end:
            found = search(text, at, at + _WINDOW + self._seen)
            if found is not None:
                return found.start()
            at += _WINDOW
        return None


def _more_bytes(text: str, start: int, end: int, most: int) -> bool:
    if (end - start) * _CHARACTER <= most:
        return False
    return end - start > most or len(text[start:end].encode(errors="surrogatepass")) > most


def is_deterministic(library: Library) -> bool:
    """Return whether the same text always gives the same ids. A BPE model with dropout draws lots."""
    model: Any = library.model
    if type(model).__name__ not in ("BPE", "WordPiece", "WordLevel", "Unigram"):
        return False
    return not getattr(model, "dropout", None) and not getattr(model, "alpha", None)


def safe_splitter(library: Library) -> TextSplitter:
    """Return the places at which texts may be cut for this tokenizer. Takes up to a few tenths of a second."""
    tokens = list(library.get_added_tokens_decoder().values())
    raw = [token.content for token in tokens if not token.normalized]
    words = _WordBoundaries(library, tokens)
    return TextSplitter(_anchors(tokens, raw), words=words.safe, drop_space=words.prepends)


def affixes(library: Library) -> tuple[list[int], list[int]] | None:
    """Return the ids that are put before and after a text if special tokens are wanted; None if that is not known."""
    found: tuple[list[int], list[int]] = ([], [])
    for step in steps_of(state_of(library.post_processor), "processors"):
        kind = step["type"]
        if kind == "ByteLevel":
            continue
        if found != ([], []):
            return None
        if kind in ("BertProcessing", "RobertaProcessing"):
            found = [step["cls"][1]], [step["sep"][1]]
        elif kind == "TemplateProcessing":
            sides: tuple[list[int], list[int]] = ([], [])
            texts = 0
            for part in step["single"]:
                if "Sequence" in part:
                    texts += 1
                else:
                    sides[min(texts, 1)].extend(step["special_tokens"][part["SpecialToken"]["id"]]["ids"])
            if texts != 1:
                return None
            found = sides
        else:
            return None
    return found


def _anchors(tokens: Iterable[AddedToken], raw: list[str]) -> list[str]:
    anchors: list[str] = []
    for token in tokens:
        content = token.content
        if token.normalized or token.lstrip or token.rstrip or token.single_word:
            continue
        # Names with digits are spare tokens, which templates do not use.
        if not (_is_mark(content[:1]) and _is_mark(content[-1:])) or any(char.isdigit() for char in content):
            continue
        if not any(_clash(content, other) for other in raw if other != content) and not _overlaps(content, content):
            anchors.append(content)
            if len(anchors) == MAX_ANCHORS:
                break
    return anchors


def _is_mark(char: str) -> bool:
    return char.isascii() and char.isprintable() and not char.isalnum() and char not in ("", " ", "_")


def _clash(content: str, other: str) -> bool:
    return content in other or _overlaps(content, other)


def _overlaps(content: str, other: str) -> bool:
    """Return whether `other` may end within `content`."""
    if content[0] not in other[1:]:
        return False
    return any(other.endswith(content[:size]) for size in range(1, min(len(content), len(other))))


class _WordBoundaries:
    """The safety of cuts at word ends, found by following one through the steps of a tokenizer."""

    def __init__(self, library: Library, tokens: list[AddedToken]) -> None:
        #: What stands for the space after the steps so far.
        self._space = " "
        #: Whether the normalizer puts that in front of every piece.
        self.prepends = False
        #: Whether no step of the pre-tokenizer may look over the place.
        self._known = True
        self.safe = (
            self._normalizers_keep_it(library)
            and self._tokens_keep_it(library, tokens)
            and (self._words_end_there(library) or self._no_token_spans_it(library))
        )

    def _normalizers_keep_it(self, library: Library) -> bool:
        for number, step in enumerate(steps_of(state_of(library.normalizer), "normalizers")):
            match step["type"]:
                case "NFC" | "NFD" | "NFKC" | "NFKD" | "Lowercase" | "StripAccents":
                    continue
                case "Nmt" | "BertNormalizer" if self._space == " " and not self.prepends:
                    continue
                case "Prepend" if number == 0 and step["prepend"] == _BLOCK:
                    self.prepends = True
                case "Replace" if isinstance(what := step["pattern"].get("String"), str):
                    if what == self._space and step["content"] == _BLOCK:
                        self._space = _BLOCK
                    elif not what or re.search(f"[a-z{_BLOCK} ]", what):
                        return False
                case _:
                    return False
        return not self.prepends or self._space == _BLOCK

    def _tokens_keep_it(self, library: Library, tokens: list[AddedToken]) -> bool:
        """Return whether no added token reaches over a word's end, or looks over it."""
        for token in tokens:
            forms = [token.content]
            if token.normalized and library.normalizer is not None:
                forms.append(library.normalizer.normalize_str(token.content))
            for form in forms:
                if not form or _OVER_A_WORD_END.search(form):
                    return False
                if token.rstrip and form[-1].isalpha():
                    return False
                if token.single_word and form[0] in (" ", _BLOCK):
                    return False
            # What is put before a piece makes up for a space within one. Beside a token there is no such space.
            if self.prepends and not token.normalized and not (_is_mark(form[0]) and _is_mark(form[-1])):
                return False
        return True

    def _words_end_there(self, library: Library) -> bool:
        """Return whether the pre-tokenizer begins a word at the space."""
        for step in steps_of(state_of(library.pre_tokenizer), "pretokenizers"):
            ends = self._ends(step)
            if ends is None:
                self._known = False
                return False
            if ends:
                return True  # what comes after works on each word alone
        return False

    def _ends(self, step: Mapping[str, Any]) -> bool | None:
        """Return whether a word ends there after this step; None if it might look over the place."""
        space = self._space
        if space == _BYTE_SPACE:
            return None
        match step["type"]:
            case "ByteLevel" if space == " ":
                # Its own pattern takes a space only before what is no space, and letters in runs of letters.
                self._space = _BYTE_SPACE
                return bool(step["use_regex"])
            case "Metaspace" if step["replacement"] == _BLOCK:
                self._space = _BLOCK
                return bool(step["split"])
            case "Whitespace" | "WhitespaceSplit" | "BertPreTokenizer" if space == " ":
                return True
            case "Digits" | "Punctuation":
                return False
            case "Split":
                return self._split(step)
        return None

    def _split(self, step: Mapping[str, Any]) -> bool | None:
        pattern, behavior = step["pattern"], step["behavior"]
        if "String" in pattern:
            what = pattern["String"]
            # Whatever is done with such matches ends at the place or goes on over it, as what is no match does.
            return None if not what or re.search(f"[a-z{self._space}]", what) else False
        if behavior not in ("Isolated", "Removed"):
            return None
        return ends_words(pattern["Regex"], self._space)

    def _no_token_spans_it(self, library: Library) -> bool:
        model: Any = library.model
        if not self._known or type(model).__name__ != "BPE":
            return False
        if model.ignore_merges or model.continuing_subword_prefix or model.end_of_word_suffix:
            return False
        vocabulary = library.get_vocab(with_added_tokens=False)
        if any(char not in vocabulary for char in "abcdefghijklmnopqrstuvwxyz" + self._space):
            return False
        over = re.compile("[a-z]" + self._space).search
        return not any(map(over, vocabulary))


def state_of(component: Any) -> dict[str, Any] | None:
    """Return a component as ``tokenizer.json`` has it."""
    if component is None:
        return None
    state: dict[str, Any] = json.loads(component.__getstate__())
    return state


def steps_of(state: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """Return the steps of a component: those of a sequence, one, or none."""
    if state is None:
        return []
    if state["type"] != "Sequence":
        return [state]
    return [step for part in state[key] for step in steps_of(part, key)]
