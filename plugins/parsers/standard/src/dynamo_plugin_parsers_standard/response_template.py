"""The `response_template` of a model's ``tokenizer_config.json``, which describes the format of its answers.

It is that of transformers: fields of the message, each with what opens and closes it. Here it becomes data for the
machines of this package. A template that they cannot follow is refused, so that the signs of its chat template decide.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import msgspec
from dynamo_core import ModelText
from dynamo_core.protocol import truncated

from dynamo_plugin_parsers_standard.formats import CallFormat, Header, Section, json_arguments, json_array, json_object
from dynamo_plugin_parsers_standard.gemma_calls import braces
from dynamo_plugin_parsers_standard.grammar import CallGrammar
from dynamo_plugin_parsers_standard.json_formats import OBJECT, list_grammar
from dynamo_plugin_parsers_standard.literal_patterns import Named, Sequence, Space, sequences
from dynamo_plugin_parsers_standard.schema_values import ANY_JSON, STRING
from dynamo_plugin_parsers_standard.state_machine import FormatParser
from dynamo_plugin_parsers_standard.tagged_parameters import TaggedSyntax, tagged

log = logging.getLogger(__name__)

#: The key of the template.
RESPONSE_TEMPLATE = "response_template"
#: The fields of a message.
CALLS, CONTENT = "tool_calls", "content"
REASONING = ("reasoning_content", "reasoning", "thinking")

#: The most texts of one kind, and the longest.
_MOST, _LONGEST = 16, 256


class Field(msgspec.Struct, forbid_unknown_fields=True):
    """One field of the message, as transformers defines it."""

    open: str | list[str] | None = None
    open_pattern: str | None = None
    close: str | list[str] | None = None
    close_pattern: str | None = None
    content: str = "text"
    content_args: dict[str, Any] = {}
    repeats: bool = False
    join: str | None = None
    optional: bool = True
    transform: Any = None
    transform_each: bool = False

    def opens(self) -> list[Sequence]:
        """Return what opens it."""
        return _delimiters("open", self.open, self.open_pattern)

    def closes(self) -> list[Sequence]:
        """Return what closes it."""
        return _delimiters("close", self.close, self.close_pattern)


class Template(msgspec.Struct, forbid_unknown_fields=True):
    """The whole template."""

    fields: dict[str, Field]
    version: int = 1
    defaults: dict[str, Any] = {}
    start_anchor: str | list[str] | None = None
    start_anchor_pattern: str | None = None

    def anchors(self) -> list[Sequence]:
        """Return what begins the message of the assistant in a prompt."""
        return _delimiters("start_anchor", self.start_anchor, self.start_anchor_pattern)


def read_template(model: ModelText) -> Template | None:
    """Return the template of a model; None if it has none.

    Raises:
        ValueError: it is not sound.
    """
    spec = model.tokenizer_config.get(RESPONSE_TEMPLATE)
    if spec is None:
        return None
    template = msgspec.convert(spec, Template)
    if template.version != 1:
        raise ValueError(f"version {template.version} is not known")
    unknown = set(template.fields) - {CALLS, CONTENT, *REASONING}
    if unknown:
        raise ValueError(f"fields.{min(unknown)} is no field of an answer")
    return template


class DescribedParser:
    """The base of both kinds of parsers that a template describes."""

    NAME = RESPONSE_TEMPLATE
    DESCRIBED = True
    #: What of an answer a template must say for the parser.
    SAYS: ClassVar[str]

    @classmethod
    def facts(cls, template: Template, model: ModelText) -> dict[str, Any] | None:
        """Return the attributes of the class for a model; None if its template does not say them.

        Raises:
            ValueError: the template cannot be followed.
        """
        raise NotImplementedError

    @classmethod
    def recognizes(cls, model: ModelText) -> str | None:
        """Return why a model has this parser. A template that cannot be followed is told in a warning."""
        try:
            facts = cls._facts_of(model)
        except ValueError as error:
            log.warning("the model's %s is not used for %s: %s", RESPONSE_TEMPLATE, cls.SAYS, error)
            return None
        return None if facts is None else f"its {RESPONSE_TEMPLATE} says {cls.SAYS}"

    @classmethod
    def for_model(cls, model: ModelText) -> type[Self]:
        """Return the class for one model.

        Raises:
            ValueError: it has no template, or none that says what is needed, or none that can be followed.
        """
        facts = cls._facts_of(model)
        if facts is None:
            raise ValueError(f"the model's tokenizer_config.json has no {RESPONSE_TEMPLATE} that says {cls.SAYS}")
        made: Any = type(cls.__name__, (cls,), {**facts, "__module__": cls.__module__})
        # A base class may have found fewer.
        made.MARKERS = facts["MARKERS"]
        found: type[Self] = made
        return found

    @classmethod
    def _facts_of(cls, model: ModelText) -> dict[str, Any] | None:
        try:
            template = read_template(model)
            return None if template is None else cls.facts(template, model)
        except ValueError as error:
            raise ValueError(truncated(str(error), _LONGEST)) from None


class TemplateParser(DescribedParser, FormatParser):
    """Calls as the model's `response_template` says."""

    SAYS = "how it calls tools"
    # As long as there is no model, all is content.
    FORMAT = CallFormat(opens=(), bodies={})

    @classmethod
    def facts(cls, template: Template, model: ModelText) -> dict[str, Any] | None:
        """Return the format of calls."""
        field = template.fields.get(CALLS)
        if field is None:
            return None
        try:
            form, inside = _call_format(field)
        except ValueError as error:
            raise ValueError(f"fields.{CALLS}: {error}") from None
        return {"FORMAT": form, "MARKERS": markers((*form.tags(), *inside), model)}


@dataclass(frozen=True, slots=True)
class _Opening:
    """The opening of calls: perhaps a section, a tag, perhaps the name and what follows it."""

    sections: tuple[str, ...]
    tags: tuple[str, ...]
    name: Named | None
    after: tuple[str, ...]


def _call_format(field: Field) -> tuple[CallFormat, tuple[str, ...]]:
    """Return the format of calls, and the tags inside of their bodies."""
    opening = _opening(field)
    closes = [_literals(each) for each in field.closes()]
    distinct((*opening.sections, *opening.tags, *(tag for each in closes for tag in each)))
    function = field.transform.get("function") if isinstance(field.transform, dict) else None
    if opening.name is not None:
        if field.transform_each or function != {"name": f"{{{opening.name.name}}}", "arguments": "{content}"}:
            raise ValueError("transform: not a function with the name of the pattern and its content as arguments")
        return _named_calls(field, opening, closes)
    if field.content != "json" or field.content_args:
        raise ValueError(f"content: calls that are {field.content!r} with these arguments have no name")
    lists = field.transform_each
    keys = ("name", "arguments", "parameters") if lists else ("content.name", "content.arguments", "content.parameters")
    functions: list[Any] = [{"name": f"{{{keys[0]}}}", "arguments": f"{{{key}}}"} for key in keys[1:]]
    if function not in (functions if lists else [*functions, "{content}"]):
        raise ValueError("transform: not a function with the name and the arguments of the content")
    return _format(opening, closes, {"[": json_array} if lists else {"{": json_object}), ()


def _named_calls(field: Field, opening: _Opening, closes: list[tuple[str, ...]]) -> tuple[CallFormat, tuple[str, ...]]:
    """Return calls whose names stand before the bodies."""
    assert opening.name is not None  # noqa: S101 - the caller has looked
    if field.content == "xml-inline":
        syntax = _syntax(field, opening, closes)
        inside = (syntax.close, syntax.key_open, *syntax.key_ends, syntax.value_open, syntax.value_close)
        return _format(opening, closes, {"": tagged(syntax)}), (*opening.after, *inside)
    if field.content != "json":
        raise ValueError(f"content: {field.content!r} are no arguments")
    match field.content_args:
        case {"unquoted_keys": True, "string_delims": [[str(quote), str(end)]], **more} if quote == end and not more:
            if any(opening.after) or not 0 < len(quote) <= _LONGEST:
                raise ValueError("open, content_args: text between the name and the braces, or an unfit delimiter")
            return _format(opening, closes, {"": braces(quote)}), (quote,)
    if field.content_args:
        raise ValueError(f"content_args: {', '.join(sorted(field.content_args))} cannot be followed in pieces")
    tags = tuple(tag for tag in opening.after if tag)
    header = Header(
        tags=dict.fromkeys(distinct(tags), ""),
        body_without_tag="" in opening.after,
        word=_word(opening.name, tags),
    )
    return _format(opening, closes, {"": json_arguments}, header), ()


def _format(
    opening: _Opening, closes: list[tuple[str, ...]], bodies: Mapping[str, Any], header: Header | None = None
) -> CallFormat:
    ends = tuple(dict.fromkeys(tag for each in closes for tag in each))
    section = None
    if opening.sections:
        section = Section(opening.sections, tuple(dict.fromkeys(each[-1] for each in closes)), optional=False)
    return CallFormat(
        opens=opening.tags,
        bodies=bodies,
        header=header,
        closes=ends,
        section=section,
        grammar=_grammar(opening, ends, bodies, header) if section is None and len(ends) == 1 else None,
    )


def _grammar(
    opening: _Opening, ends: tuple[str, ...], bodies: Mapping[str, Any], header: Header | None
) -> CallGrammar | None:
    tag, end = opening.tags[0], ends[0]
    if "{" in bodies:
        return CallGrammar(f"{tag}{OBJECT}", f"}}{end}", tag)
    if "[" in bodies:
        return list_grammar(tag, end)
    return None if header is None else CallGrammar(f"{tag}{{name}}{opening.after[0]}", end, tag)


def _opening(field: Field) -> _Opening:
    """Split what opens calls at the name."""
    before: list[tuple[str, ...]] = []
    names: list[Named | None] = []
    after: list[str] = []
    for each in field.opens():
        at = next((at for at, piece in enumerate(each) if isinstance(piece, Named)), len(each))
        before.append(_literals(each[:at]))
        names += [piece for piece in each[at : at + 1] if isinstance(piece, Named)] or [None]
        after.append("".join(_literals(each[at + 1 :])))
    if not before or len(set(names)) > 1 or len({len(each) for each in before}) > 1 or len(before[0]) not in (1, 2):
        raise ValueError("open: not one tag, or two, with the name after it or not")
    sections = tuple(dict.fromkeys(each[0] for each in before if len(each) > 1))
    return _Opening(sections, tuple(dict.fromkeys(each[-1] for each in before)), names[0], tuple(dict.fromkeys(after)))


def _syntax(field: Field, opening: _Opening, closes: list[tuple[str, ...]]) -> TaggedSyntax:
    """Return the tags of a call with parameters."""
    match field.content_args:
        case {"tag_pattern": str(pattern), **more} if set(more) <= {"value_parser"}:
            types = _value_types(more.get("value_parser"))
        case _:
            raise ValueError("content_args: not a tag_pattern, maybe with a value_parser")
    ways = sequences(pattern)
    white = [piece for way in ways for piece in way if isinstance(piece, Space) or piece != _bare(piece)]
    match [tuple(_bare(piece) for piece in way if not isinstance(piece, Space)) for way in ways]:
        case [(str(key_open), Named("key"), str(key_end), Named("value"), str(value_close))]:
            value_open = ""
        case [(str(key_open), Named("key"), str(key_end), str(value_open), Named("value"), str(value_close))]:
            pass
        case _:
            raise ValueError("content_args.tag_pattern: not a key and a value between tags")
    if len(closes) != 1 or len(opening.after) != 1:
        raise ValueError("open, close: not one way to open and to close a call")
    sections = (closes[0][-1], *opening.sections) if opening.sections else ()
    return TaggedSyntax(
        name_end=opening.after[0],
        close=closes[0][0],
        key_open=key_open,
        key_ends={key_end: types},
        value_open=value_open,
        value_close=value_close,
        stops=(*sections, *opening.tags),
        doubtful=False,
        newlines=bool(white) and not value_open,
    )


def _value_types(parser: Any) -> frozenset[str]:
    match parser:
        case None | {"name": "text"}:
            return STRING
        case {"name": "json", **more} if more in ({}, {"args": {}}, {"args": {"allow_non_json": True}}):
            return ANY_JSON
    raise ValueError("content_args.value_parser: neither text nor JSON")


def _word(name: Named, tags: tuple[str, ...]) -> re.Pattern[str]:
    """Return the characters of a name: those of its class, but for white space and the start of the next tag."""
    firsts = {tag[0] for tag in tags}
    try:
        chars = re.compile(name.chars)
    except re.error as error:
        raise ValueError(f"open_pattern: {name.chars!r} is no class of characters: {error}") from None
    if name.chars not in (".", r"\S") and any(map(chars.match, firsts)):
        raise ValueError("open_pattern: the text after the name may be part of the name")
    never = "|".join([r"\s", r"\{", *map(re.escape, sorted(firsts))])
    return re.compile(f"(?:(?!{never}){name.chars})*")


def _delimiters(key: str, literal: str | list[str] | None, pattern: str | None) -> list[Sequence]:
    if literal is not None:
        texts = [literal] if isinstance(literal, str) else literal
        if pattern is not None or not 0 < len(texts) <= _MOST or not all(0 < len(text) <= _LONGEST for text in texts):
            raise ValueError(f"{key}: not one text, up to {_MOST} texts of {_LONGEST} characters, or a pattern")
        return [(text,) for text in dict.fromkeys(texts)]
    try:
        return [] if pattern is None else sequences(pattern)
    except ValueError as error:
        raise ValueError(f"{key}_pattern: {error}") from None


def _literals(sequence: Sequence) -> tuple[str, ...]:
    """Return the tags of a sequence without names, between which white space may stand."""
    found = [_bare(piece) for piece in sequence if not isinstance(piece, Space)]
    texts = tuple(piece for piece in found if isinstance(piece, str) and piece)
    if len(texts) != len(found):
        raise ValueError("a tag is only white space, or a name stands where none is expected")
    return texts


def _bare(piece: Any) -> Any:
    return piece.strip() if isinstance(piece, str) else piece


def markers(tags: tuple[str, ...], model: ModelText) -> tuple[str, ...]:
    """Return the special tokens that tags may be made of: tags, and tokens of the model that are part of one."""
    parts = sorted(token for token in model.special_tokens if token and any(token in tag for tag in tags))
    return tuple(dict.fromkeys((*filter(None, tags), *parts)))


def distinct(tags: tuple[str, ...]) -> tuple[str, ...]:
    """Return the tags, of which none may be the beginning of another.

    Raises:
        ValueError: one is.
    """
    for tag in set(tags):
        if any(other != tag and other.startswith(tag) for other in tags):
            raise ValueError(f"the tag {tag!r} is the beginning of another one")
    return tags
