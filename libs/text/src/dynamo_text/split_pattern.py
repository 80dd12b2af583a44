"""The behaviour of a splitting regex at a word's end: between a letter a to z and the space after it.

The patterns are those of tokenizers (Oniguruma syntax). Nothing is run here: a pattern is read, and only what follows
from its form counts. What is not understood is `None`, "may be anything".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Classes of characters that hold no letter a to z and no space.
_FOREIGN = frozenset({"han", "hiragana", "katakana", "hangul", "thai", "cyrillic", "greek", "arabic", "hebrew"})


@dataclass(frozen=True, slots=True)
class _CharSet:
    """A set of characters, as far as it matters: letters a to z, and the space.

    `some` and `may` are cautious: false only if surely none of these letters, or not the space, is in the set. `every`
    and `must` are true only if surely all of the letters, or the space, are in it.
    """

    some: bool = False
    every: bool = False
    may: bool = False
    must: bool = False

    def __or__(self, other: _CharSet) -> _CharSet:
        return _CharSet(
            self.some or other.some, self.every or other.every, self.may or other.may, self.must or other.must
        )

    def __invert__(self) -> _CharSet:
        return _CharSet(not self.every, not self.some, not self.must, not self.may)


_NONE = _CharSet()
_ALL = _CharSet(True, True, True, True)
_UNKNOWN = _CharSet(some=True, may=True)
_LETTERS = _CharSet(some=True, every=True)


@dataclass(frozen=True, slots=True)
class _Shape:
    """A part of a pattern. Where it is not certain, the cautious answer stands."""

    #: Whether a match may begin or end with a letter, or with the space; whether it may be empty.
    first_letter: bool = False
    first_space: bool = False
    last_letter: bool = False
    empty: bool = True
    #: Whether a match may hold a letter with the space right after it.
    crosses: bool = False
    #: Whether it surely matches each letter alone, and whether it surely matches nothing before a letter.
    single: bool = False
    steps_aside: bool = True


def _one(chars: _CharSet) -> _Shape:
    return _Shape(chars.some, chars.may, chars.some, empty=False, single=chars.every, steps_aside=False)


def _then(a: _Shape, b: _Shape) -> _Shape:
    return _Shape(
        a.first_letter or (a.empty and b.first_letter),
        a.first_space or (a.empty and b.first_space),
        b.last_letter or (b.empty and a.last_letter),
        a.empty and b.empty,
        a.crosses or b.crosses or (a.last_letter and b.first_space),
        (a.single and b.steps_aside) or (a.steps_aside and b.single),
        a.steps_aside and b.steps_aside,
    )


def _either(a: _Shape, b: _Shape) -> _Shape:
    return _Shape(
        a.first_letter or b.first_letter,
        a.first_space or b.first_space,
        a.last_letter or b.last_letter,
        a.empty or b.empty,
        a.crosses or b.crosses,
        a.single or b.single,
        a.steps_aside or b.steps_aside,
    )


def _repeated(a: _Shape, low: int, high: int | None, *, possessive: bool) -> _Shape:
    many = high is None or high > 1
    optional = low == 0
    return _Shape(
        a.first_letter,
        a.first_space,
        a.last_letter,
        a.empty or optional,
        a.crosses or (many and a.last_letter and a.first_space),
        a.single and low <= 1 and high != 0,
        # What is possessive never gives back, so it steps aside only if it cannot take the letter at all.
        optional and (not possessive or not a.first_letter),
    )


class _UnsupportedPatternError(Exception):
    """The pattern holds something that this reader does not know."""


def ends_words(pattern: str, space: str) -> bool | None:
    """Return whether a split by `pattern` always cuts between a letter a to z and the `space` after it.

    `space` is the character that stands for a space at this point. True: a match always ends there. False: no match
    spans the two, but the letter need not be in a match. None: nothing is certain. If it is True or False, the matches
    before such a place do not depend on the text after it, nor the other way round:

    - No path through the pattern takes a letter and then the space, so before the place only characters before it are
      taken, whether the text goes on or not. The only look-ahead that is understood is "not followed by one of these
      characters", where the space is not one of them: at the place itself it holds as it does at the end of a text.
    - A regex that looks at nothing behind it finds the same matches from the place on.
    """
    try:
        shape = _Reader(pattern, space).read()
    except _UnsupportedPatternError:
        return None
    if shape.crosses or shape.empty:
        return None
    return shape.single


class _Reader:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str, space: str) -> None:
        self._text = pattern
        self._at = 0
        self._space = space

    def read(self) -> _Shape:
        shape = self._alternatives(ignore_case=False)
        if self._at != len(self._text):
            raise _UnsupportedPatternError
        return shape

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        char = self._peek()
        if not char:
            raise _UnsupportedPatternError
        self._at += 1
        return char

    def _taken(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _alternatives(self, *, ignore_case: bool) -> _Shape:
        shape = self._sequence(ignore_case)
        while self._taken("|"):
            shape = _either(shape, self._sequence(ignore_case))
        return shape

    def _sequence(self, ignore_case: bool) -> _Shape:
        shape = _Shape()
        while self._peek() not in ("", "|", ")"):
            shape = _then(shape, self._quantified(ignore_case))
        return shape

    def _quantified(self, ignore_case: bool) -> _Shape:
        shape = self._atom(ignore_case)
        if self._taken("?"):
            low, high = 0, 1
        elif self._taken("*"):
            low, high = 0, None
        elif self._taken("+"):
            low, high = 1, None
        elif self._peek() == "{":
            low, high = self._bounds()
        else:
            return shape
        # A mark right after makes it lazy or possessive. After {…} it may be a quantifier of its own instead.
        counted = self._text[self._at - 1] == "}"
        lazy = self._taken("?")
        possessive = not lazy and self._taken("+")
        if self._peek() in ("?", "*", "+", "{"):
            raise _UnsupportedPatternError  # which of them are marks is a matter of taste
        shape = _repeated(shape, low, high, possessive=possessive)
        if counted and possessive:
            shape = _repeated(shape, 1, None, possessive=True)
        elif counted and lazy:
            shape = _either(shape, _Shape(steps_aside=False))
        return shape

    def _bounds(self) -> tuple[int, int | None]:
        found = re.compile(r"\{(\d+)(?:(,)(\d*))?\}").match(self._text, self._at)
        if found is None:
            raise _UnsupportedPatternError
        self._at = found.end()
        low, comma, high = found.groups()
        if not comma:
            return int(low), int(low)
        return int(low), int(high) if high else None

    def _atom(self, ignore_case: bool) -> _Shape:
        char = self._take()
        if char == "(":
            return self._group(ignore_case)
        if char == "[":
            return _one(self._class(ignore_case))
        if char == "\\":
            return _one(self._escape(ignore_case))
        if char == ".":
            return _one(_ALL)
        if char in "^$*+?{":
            raise _UnsupportedPatternError
        return _one(self._literal(char, ignore_case))

    def _group(self, ignore_case: bool) -> _Shape:
        if self._taken("?!"):
            # The look-ahead: one character only, and never the space.
            kind = self._take()
            if kind == "\\":
                chars = self._escape(ignore_case)
            elif kind == "[":
                chars = self._class(ignore_case)
            else:
                raise _UnsupportedPatternError
            if chars.may or not self._taken(")"):
                raise _UnsupportedPatternError
            return _Shape(steps_aside=False)
        if self._taken("?i:"):
            ignore_case = True
        elif not self._taken("?:") and self._peek() == "?":
            raise _UnsupportedPatternError
        shape = self._alternatives(ignore_case=ignore_case)
        if not self._taken(")"):
            raise _UnsupportedPatternError
        return shape

    def _class(self, ignore_case: bool) -> _CharSet:
        negated = self._taken("^")
        chars = _NONE
        if self._peek() == "]":
            raise _UnsupportedPatternError
        while not self._taken("]"):
            char = self._take()
            if char == "[" or (char == "&" and self._peek() == "&"):
                raise _UnsupportedPatternError
            if char == "\\":
                if self._peek() in "nrtfv\\-[](){}^$.|*+?/ \"'#&~":
                    char = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}.get(self._peek(), self._peek())
                    self._at += 1
                else:
                    chars |= self._escape(ignore_case)
                    continue
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                last = self._take()
                if last in "\\[":
                    raise _UnsupportedPatternError
                chars |= self._range(char, last, ignore_case)
            else:
                chars |= self._literal(char, ignore_case)
        return ~chars if negated else chars

    def _literal(self, char: str, ignore_case: bool) -> _CharSet:
        return self._range(char, char, ignore_case)

    def _range(self, first: str, last: str, ignore_case: bool) -> _CharSet:
        every = first <= "a" and last >= "z"
        some = first <= "z" and last >= "a"
        if ignore_case and not (first.isascii() and last.isascii() and last < "A"):
            some = True
        space = first <= self._space <= last
        return _CharSet(some, every, space, space)

    def _escape(self, ignore_case: bool) -> _CharSet:
        char = self._take()
        if char in "pP":
            return self._property(ignore_case, negated=char == "P")
        if char in "sS":
            space = self._space == " "
            chars = _CharSet(may=space, must=space)
            return ~chars if char == "S" else chars
        if char in "dD":
            return ~_NONE if char == "D" else _NONE
        if char in "wW":
            return ~_LETTERS if char == "W" else _LETTERS
        if char in "nrtfv":
            return _NONE
        if char.isalnum():
            raise _UnsupportedPatternError
        return self._literal(char, ignore_case)

    def _property(self, ignore_case: bool, *, negated: bool) -> _CharSet:
        found = re.compile(r"\{(\^?)([A-Za-z_ ]+)\}").match(self._text, self._at)
        if found is None:
            raise _UnsupportedPatternError
        self._at = found.end()
        name = found[2].replace("_", "").replace(" ", "").lower()
        if name in ("l", "ll", "letter", "lowercaseletter"):
            chars = _LETTERS
        elif name in ("lu", "lt", "lm", "lo"):
            chars = _CharSet(some=ignore_case)
        elif name[0] in "mnpc" and len(name) <= 2:
            chars = _NONE
        elif name in ("z", "zs"):
            chars = _CharSet(may=self._space == " ", must=self._space == " ")
        elif name in ("s", "so"):
            chars = _CharSet(may=self._space != " ", must=self._space != " ")
        elif name in ("sm", "sc", "sk", "zl", "zp") or name in _FOREIGN:
            chars = _NONE
        else:
            chars = _UNKNOWN
        return ~chars if negated != bool(found[1]) else chars
