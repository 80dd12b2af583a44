"""Ignored parts of a client's body, and the header that reports them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web

from dynamo_generation.requests.fields import NEVER_IGNORED

if TYPE_CHECKING:
    from collections.abc import Collection

    from dynamo_core import FrontendServices

#: The header that names what was left out.
HEADER = "x-dynamo-ignored-fields"
#: Where a request keeps the value of that header until it is answered.
_KEY = web.RequestKey("ignored fields", str)
#: Names that the header has room for, and characters of each.
_MOST, _LONGEST = 20, 64
_UNSAFE = re.compile(r"[^\w.\[\]-]", re.ASCII)


class IgnoredFields:
    """Leaves out fields that no API documents, if `unknown`, and counts and names everything that is left out."""

    def __init__(self, services: FrontendServices, *, unknown: bool) -> None:
        self.unknown = unknown
        self._count = services.metrics.counter(
            f"{services.metrics_prefix}_ignored_fields_total",
            "Fields and tools that were left out of requests; x-dynamo-ignored-fields names them to the client.",
            ("endpoint",),
        )

    def strip(self, http: web.Request, raw: dict[str, Any], known: Collection[str], endpoint: str) -> None:
        """Take out of a body what is not `known`."""
        names = [name for name in raw if name not in known and name not in NEVER_IGNORED]
        for name in names:
            del raw[name]
        self.report(http, names, endpoint)

    def report(self, http: web.Request, names: Sequence[str], endpoint: str) -> None:
        """Count what was left out, and let the answer name it."""
        if not names:
            return
        self._count.labels(endpoint).inc(len(names))
        shown = [_UNSAFE.sub("?", name[:_LONGEST]) for name in names[:_MOST]]
        if len(names) > _MOST:
            shown.append(f"and {len(names) - _MOST} more")
        http[_KEY] = ", ".join([http[_KEY], *shown] if _KEY in http else shown)


def any_ignored(http: web.Request) -> bool:
    """Return whether the answer has to name something that was left out."""
    return _KEY in http


def headers_of(http: web.Request) -> dict[str, str]:
    """Return the headers that an answer needs for that."""
    return {HEADER: http[_KEY]} if _KEY in http else {}
