"""The end user and session that a request body names, added to the principal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from dynamo_core import Principal
from dynamo_http import check_session

#: The keys that lead to a field of a body, from the outside in.
Field: TypeAlias = tuple[str, ...]

#: Of the OpenAI API, best first.
USER: Sequence[Field] = (("safety_identifier",), ("user",))
SESSION: Sequence[Field] = (("nvext", "session_id"), ("prompt_cache_key",))
#: Of the Responses API, whose conversations are an id or an object with one.
RESPONSES_SESSION: Sequence[Field] = (("conversation", "id"), ("conversation",), ("prompt_cache_key",))
#: Of the Anthropic API.
MESSAGES_USER: Sequence[Field] = (("metadata", "user_id"),)


def with_end_user(
    principal: Principal, raw: Mapping[str, Any], user: Sequence[Field], session: Sequence[Field]
) -> Principal:
    """Return the principal with what the first given field of each kind says.

    A header's session goes before all of them.

    Raises:
        InvalidArgument: the session cannot be one.
    """
    _, name = _first(raw, user)
    place, known = ("", "") if principal.session else _first(raw, session)
    return principal.with_end_user(user=name, session=check_session(known, place) if known else "")


def _first(raw: Mapping[str, Any], fields: Sequence[Field]) -> tuple[str, str]:
    """Return the first field that holds text, and its text; empty if none does."""
    for field in fields:
        value: Any = raw
        for key in field:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, str) and value:
            return ".".join(field), value
    return "", ""
