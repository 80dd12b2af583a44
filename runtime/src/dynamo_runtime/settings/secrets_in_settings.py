"""Secrets: resolving ``${env:NAME}`` and ``${file:PATH}``, and hiding secret values in dumps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

from dynamo_core.errors import ConfigError
from dynamo_core.files import SECRET, read_file

from dynamo_runtime.settings.tree import Leaf, Path, Table, leaves, location

HIDDEN = "***"

_REFERENCE = re.compile(r"\$(\$\{|\{(env|file):([^}]*)\}|\{)")
_SECRET_WORDS = re.compile(
    r"secret|password|passwd|passphrase|credential|authorization|api_?key|private_?key|access_?key"
)
_TOKEN = re.compile(r"(^|_)token$")
_TOKENS = re.compile(r"(^|_)tokens$")
#: Keys whose values are addresses, with or without a scheme.
_ADDRESS = re.compile(
    r"(^|_)(addr|address|advertise|bind|broker|connection|dsn|endpoint|host|origin|peer|proxy|server|store|uri|url)"
    r"(e?s)?($|_)"
)
#: The hash of a key, against which a guess can be tried.
_HASH = re.compile(r"sha256:[0-9a-fA-F]*")
#: The query or the fragment of an address, whichever is first.
_QUERY = re.compile(r"(?s)([?#]).*")
#: ``password=…`` and the like, as connection strings have them. All repeats are bounded: values may be long.
_ASSIGNED = re.compile(
    r"(?i)((?:secret|pass|pwd|token|api_?key|access_?key|credential)[\w.-]{0,40}\s{0,8}=\s{0,8})"
    r"""('[^']*'|"[^"]*"|[^\s&;]+)"""
)


def redacted(path: Sequence[str], value: Any) -> Any:
    """Return the value as it may be shown: ``***`` if its path names a secret, or if it is the hash of one.

    Addresses are shown without credentials.
    """
    # A worker may be called `token`: names that the user chose do not mark a secret.
    keys = [*path[:1], *path[2:]] if path[:1] == ("workers",) else list(path)
    return _redacted([key.lower().replace("-", "_") for key in keys], value)


def _redacted(keys: list[str], value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return {key: _redacted([*keys, str(key).lower().replace("-", "_")], child) for key, child in value.items()}
    if any(_SECRET_WORDS.search(key) or _TOKEN.search(key) for key in keys):
        return HIDDEN
    if isinstance(value, list | tuple):
        return [_redacted(keys, child) for child in value]
    if isinstance(value, str):
        # `max_tokens: 5` is a number of tokens, `tokens: [abc]` are tokens.
        if _HASH.fullmatch(value) or any(_TOKENS.search(key) for key in keys):
            return HIDDEN
        return without_credentials(value, address=any(_ADDRESS.search(key) for key in keys))
    return value


def without_credentials(text: str, *, address: bool = False) -> str:
    """Return a text in which what may be a login or a key is ``***``; `address` says that it is meant as an address.

    Passwords may have any character, so an address is hidden up to its last ``@``, and so are its whole query and
    fragment.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "", text
    if separator or address or _is_login(text):
        login, at, location = rest.rpartition("@")
        if _QUERY.search(login):
            # Either the password or the query goes on behind it; the text does not tell which.
            return f"{scheme}{separator}{HIDDEN}"
        # An address has a login before the ``@``; ``@file`` has none.
        rest = f"{HIDDEN if login else ''}{at}{location}"
    if separator or address:
        rest = _QUERY.sub(rf"\1{HIDDEN}", rest)
    return _ASSIGNED.sub(rf"\1{HIDDEN}", f"{scheme}{separator}{rest}")


def _is_login(text: str) -> bool:
    """Return whether a text may be ``user:password@host``."""
    login, at, _ = text.rpartition("@")
    return bool(at) and ":" in login and len(text.split()) == 1


class _Missing(Exception):
    """A reference that cannot be resolved, and why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def resolve(
    table: Table, env: Mapping[str, str], path: Path = (), *, lenient: bool = False, keys: Path | None = None
) -> Table:
    """Fill in every reference, and note for every value what may be shown of it.

    With `lenient` a value whose reference cannot be resolved is marked as unfilled, and shows the reason. `keys` is the
    path without names of entries, which mark no secret.

    Raises:
        ConfigError: a variable is not set, a file cannot be read, or a reference has an unknown form.
    """
    children: dict[str, Leaf | Table] = {}
    for key, node in table.children.items():
        below = (*path, key)
        secret = (*(path if keys is None else keys), *(() if table.listed else (key,)))
        if isinstance(node, Table):
            children[key] = resolve(node, env, below, lenient=lenient, keys=secret)
        else:
            children[key] = _resolve_leaf(node, env, below, secret, lenient)
    return replace(table, children=children)


def referenced_files(table: Table) -> set[FilePath]:
    """Return the files that ``${file:PATH}`` names anywhere in a tree that has not been resolved."""
    return {FilePath(name) for _, leaf in leaves(table) for name in _files_of(leaf.value)}


def _files_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield from (match[3] for match in _REFERENCE.finditer(value) if match[2] == "file")
    elif isinstance(value, list | Mapping):
        for child in value.values() if isinstance(value, Mapping) else value:
            yield from _files_of(child)


def _resolve_leaf(leaf: Leaf, env: Mapping[str, str], path: Path, keys: Path, lenient: bool) -> Leaf:
    where = location(leaf.origin, ".".join(path))
    try:
        value, shown = _fill_in(leaf.value, env, where)
    except _Missing as missing:
        if not lenient:
            raise ConfigError(f"{where}: {missing.reason}") from None
        return replace(leaf, shown=f"{HIDDEN} ({missing.reason})", hidden=True, unfilled=True)
    shown = redacted(keys, shown)
    hidden = shown != value
    as_written = value == leaf.value
    return Leaf(
        value,
        leaf.origin,
        leaf.text if as_written else None,
        shown if hidden else None,
        hidden,
        items=leaf.items if as_written else (),
    )


def _fill_in(value: Any, env: Mapping[str, str], where: str) -> tuple[Any, Any]:
    """Return the value with references filled in, and the same as it may be shown."""
    if isinstance(value, list):
        pairs = [_fill_in(child, env, where) for child in value]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if isinstance(value, Mapping):
        filled = {key: _fill_in(child, env, where) for key, child in value.items()}
        return {key: pair[0] for key, pair in filled.items()}, {key: pair[1] for key, pair in filled.items()}
    if not isinstance(value, str) or "${" not in value:
        return value, value
    secret = False

    def look_up(match: re.Match[str]) -> str:
        nonlocal secret
        if match[1] == "${":
            return "${"
        if match[2] is None:
            # What follows is not repeated: it may be part of a password.
            raise ConfigError(
                f"{where}: '${{' begins no known reference: write ${{env:NAME}} or ${{file:PATH}}, "
                "or $${ for a plain ${"
            )
        secret = True
        return _from_env(match[3], env) if match[2] == "env" else _from_file(match[3])

    text = _REFERENCE.sub(look_up, value)
    return text, HIDDEN if secret else text


def _from_env(name: str, env: Mapping[str, str]) -> str:
    if name not in env:
        raise _Missing(f"environment variable '{name}' is not set")
    return env[name]


def _from_file(name: str) -> str:
    try:
        # Editors and secret stores end files with a newline that is not part of the secret.
        return read_file(name, SECRET).data.decode("utf-8").rstrip("\r\n")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a UTF-8 text file"
        raise _Missing(f"file '{name}' cannot be read: {reason}") from None
