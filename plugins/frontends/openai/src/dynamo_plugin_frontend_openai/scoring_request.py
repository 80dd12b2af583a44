"""Requests that score documents: pairs of texts, and documents to be sorted by relevance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
from dynamo_generation.bodies.decode import NOT_EMPTY, to_struct
from dynamo_generation.requests import fields
from dynamo_generation.requests.common import invalid

#: The names that clients have for the queries and the documents of a score request.
NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))

_INT = msgspec.Meta(le=2**31 - 1)


class TextItem(msgspec.Struct, forbid_unknown_fields=True):
    """A text as an object."""

    text: str


OneText: TypeAlias = str | TextItem
Texts: TypeAlias = Annotated[str | TextItem | list[str | TextItem], NOT_EMPTY]


class ScoringRequest(msgspec.Struct, kw_only=True):
    """The fields that both kinds of request have. A limit of 0 is none."""

    model: Annotated[str, NOT_EMPTY]
    max_tokens_per_query: Annotated[int, _INT] | None = None
    max_tokens_per_doc: Annotated[int, _INT] | None = None
    truncate_prompt_tokens: Annotated[int, _INT] | None = None
    user: str | None = None


class PairsRequest(ScoringRequest, kw_only=True):
    """Queries and documents, under one of several pairs of names."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None


class RerankRequest(ScoringRequest, kw_only=True):
    """A query and the documents to be sorted. A `top_n` of 0 means all."""

    query: Annotated[OneText, NOT_EMPTY]
    documents: Texts
    top_n: Annotated[int, _INT] | None = None
    return_documents: bool | None = None


RequestT = TypeVar("RequestT", bound=ScoringRequest)


@dataclass(frozen=True, slots=True)
class ParsedScoring:
    """A checked request and its texts: one query, or as many as there are documents.

    `names` are the fields that they were in.
    """

    request: ScoringRequest
    names: tuple[str, str]
    queries: list[str]
    documents: list[str]


@dataclass(frozen=True, slots=True)
class ParsedRerank(ParsedScoring):
    """A checked request for sorted documents."""

    request: RerankRequest


def parse_pairs(raw: dict[str, Any]) -> ParsedScoring:
    """Checks a request for scores as far as no model is needed for it.

    Raises:
        InvalidArgument: naming the field.
    """
    request = _checked(raw, PairsRequest)
    given = {name for name in _TEXT_FIELDS if getattr(request, name) is not None}
    names = next((names for names in NAMES if given == set(names)), None)
    if names is None:
        known = "; ".join(" and ".join(names) for names in NAMES)
        raise invalid(f"Exactly two fields with texts must be given: {known}", min(given, default=NAMES[0][0]))
    queries, documents = (_texts(getattr(request, name), name) for name in names)
    if len(queries) not in (1, len(documents)):
        raise invalid(
            f"{names[0]} must hold one text, or as many as {names[1]}: got {len(queries)} and {len(documents)}",
            names[0],
        )
    return ParsedScoring(request, names, queries, documents)


def parse_rerank(raw: dict[str, Any]) -> ParsedRerank:
    """Checks a request for sorted documents as far as no model is needed for it.

    Raises:
        InvalidArgument: naming the field.
    """
    request = _checked(raw, RerankRequest)
    if request.top_n is not None and request.top_n < 0:
        raise invalid(f"top_n must be at least 0, got {request.top_n}", "top_n")
    names = ("query", "documents")
    return ParsedRerank(request, names, *(_texts(getattr(request, name), name) for name in names))


_TEXT_FIELDS = tuple(dict.fromkeys(name for names in NAMES for name in names))


def _checked(raw: dict[str, Any], cls: type[RequestT]) -> RequestT:
    request = to_struct(raw, cls)
    fields.check_known(raw, cls.__struct_fields__, fields.SCORING)
    fields.check_passive(raw, fields.SCORING)
    if not request.model.strip():
        raise invalid("Model cannot be empty", "model")
    for name in ("max_tokens_per_query", "max_tokens_per_doc"):
        value = getattr(request, name)
        if value is not None and value < 0:
            raise invalid(f"{name} must be at least 0, got {value}", name)
    wish = request.truncate_prompt_tokens
    if wish is not None and wish < 1 and wish != -1:
        raise invalid(f"truncate_prompt_tokens must be at least 1, or -1, got {wish}", "truncate_prompt_tokens")
    if request.user is not None and not request.user.strip():
        raise invalid("User ID cannot be empty", "user")
    return request


def _texts(value: OneText | list[OneText], field: str) -> list[str]:
    items = value if isinstance(value, list) else [value]
    if not items:
        raise invalid(f"{field} must hold at least one text", field)
    texts = [item if isinstance(item, str) else item.text for item in items]
    for index, text in enumerate(texts):
        if not text:
            where = f"{field}[{index}]" if isinstance(value, list) else field
            raise invalid(f"{where} cannot be empty", where)
    return texts
