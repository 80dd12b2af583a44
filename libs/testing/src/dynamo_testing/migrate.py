"""Brings a plugin that was written for DYNAMO_API 1 to version 2: ``python -m dynamo_testing.migrate FOLDER``.

Rewrites imports whose module has moved and names that have changed, and raises ``DYNAMO_API``. What it cannot know to
be a name of ours, such as a method, it reports with file and line. docs/how-to/migrate-to-api-2.md has the same table.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

#: Where the names of a module are imported from now. The longest prefix counts; with ``.*`` the rest of the path stays.
MODULES: Mapping[str, str] = {
    "dynamo_core.certificates": "dynamo_core",
    "dynamo_core.contracts": "dynamo_core",
    "dynamo_core.directory": "dynamo_leases",
    "dynamo_core.directory.loop_thread": "dynamo_core",
    "dynamo_core.directory.starting": "dynamo_core",
    "dynamo_core.directory.strangers": "dynamo_core",
    "dynamo_core.hookspecs": "dynamo_core",
    "dynamo_core.http": "dynamo_core.http",
    "dynamo_core.kv": "dynamo_core.kv",
    "dynamo_core.protocol": "dynamo_core",
    "dynamo_core.protocol.annotated": "dynamo_core.protocol",
    "dynamo_core.protocol.ids": "dynamo_core.protocol",
    "dynamo_core.protocol.reading": "dynamo_core.protocol",
    "dynamo_core.protocol.records": "dynamo_core.protocol",
    "dynamo_core.tasks": "dynamo_core",
    "dynamo_core.telemetry": "dynamo_core.telemetry",
    "dynamo_core.testing": "dynamo_testing.*",
    "dynamo_core.text": "dynamo_text.*",
    "dynamo_core.text.folder": "dynamo_core",
    "dynamo_core.text.tokenizer": "dynamo_core",
    "dynamo_core.wire": "dynamo_wire",
    "dynamo_core.wire.brokered": "dynamo_wire.brokered",
}

#: Names that have changed, by the module in which they were.
NAMES: Mapping[tuple[str, str], str] = {
    ("dynamo_core.contracts.frontend", "known_as"): "dynamo_core.set_request_id",
    ("dynamo_core.contracts.router", "BoardView"): "dynamo_core.LoadView",
    ("dynamo_core.contracts.router", "Considered"): "dynamo_core.ScoredRank",
    ("dynamo_core.directory.keeper", "Keeper"): "dynamo_leases.HeartbeatThread",
    ("dynamo_core.directory.lease", "BeatingLease"): "dynamo_leases.HeartbeatLease",
    ("dynamo_core.directory.lease", "new_id"): "dynamo_leases.new_lease_id",
    ("dynamo_core.directory.lines", "Lines"): "dynamo_leases.LineDecoder",
    ("dynamo_core.directory.looking", "Looking"): "dynamo_leases.Poller",
    ("dynamo_core.directory.patience", "Patience"): "dynamo_leases.LeaseFailureTracker",
    ("dynamo_core.directory.records", "check"): "dynamo_leases.check_record",
    ("dynamo_core.directory.remote", "Tell"): "dynamo_leases.OnChange",
    ("dynamo_core.directory.times", "heartbeat"): "dynamo_leases.heartbeat_interval",
    ("dynamo_core.directory.times", "spread"): "dynamo_core.jitter",
    ("dynamo_core.directory.tls", "TlsConfig"): "dynamo_core.ClientTls",
    ("dynamo_core.http.errors", "error_type"): "dynamo_core.errors.error_type",
    ("dynamo_core.http.tls", "TlsFiles"): "dynamo_core.ServerTls",
    ("dynamo_core.http.tls", "server_context"): "dynamo_core.server_context",
    ("dynamo_core.kv.chains", "private_names"): "dynamo_core.kv.unshared_blocks",
    ("dynamo_core.protocol.ids", "id_of"): "dynamo_core.protocol.parse_instance_id",
    ("dynamo_core.protocol.ids", "id_text"): "dynamo_core.protocol.format_instance_id",
    ("dynamo_core.protocol.left_out", "LeftOut"): "dynamo_core.protocol.UnreadableWarner",
    ("dynamo_core.text.prefix_cache", "TokenMemory"): "dynamo_text.TokenCacheStore",
    ("dynamo_core.wire.brokered.broker", "Letter"): "dynamo_wire.brokered.OutboundMessage",
    ("dynamo_core.wire.brokered.settings", "TlsConfig"): "dynamo_core.ClientTls",
    ("dynamo_core.wire.liveness", "Act"): "dynamo_wire.Action",
    ("dynamo_core.wire.liveness", "patience"): "dynamo_wire.silence_limit",
}

#: Methods, attributes and parameters that have changed: they are reported, since any object may have one of the name.
ATTRIBUTES: Mapping[str, str] = {
    "want_whole": "ToolCallParser.want_whole is buffer_calls",
    "board": "RouterServices.board is tracker, a LoadView",
    "early": "HttpRoute.early is before_ready",
    "refusal": "HttpRoute.refusal is respond_error, and is given a Problem",
    "shown": "HttpRoute.shown is display_path",
    "listed": "ThresholdControl.listed is changed_models",
    "gather": "TokenStream.on_ready(gather=) is coalesce=",
}

_API = re.compile(r"^(DYNAMO_API\s*(?::[^=]+)?=\s*)1\b", re.MULTILINE)


def migrated(source: str) -> tuple[str, list[tuple[int, str]]]:
    """The source for version 2, and what has to be looked at by hand: line and advice.

    Raises:
        SyntaxError: it is no Python source.
    """
    tree = ast.parse(source)
    lines = source.splitlines(keepends=True)
    renamed: dict[str, str] = {}
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0]
    for node in sorted(statements, key=lambda node: -node.lineno):
        groups: dict[str, list[str]] = defaultdict(list)
        for alias in node.names:
            module, name = _now(node.module or "", alias.name)
            groups[module].append(f"{name} as {alias.asname}" if alias.asname else name)
            if name != alias.name and not alias.asname:
                renamed[alias.name] = name
        if list(groups) != [node.module] or renamed:
            indent = " " * node.col_offset
            lines[node.lineno - 1 : node.end_lineno] = [
                f"{indent}from {module} import {', '.join(names)}\n" for module, names in groups.items()
            ]
    text = _API.sub(r"\g<1>2", "".join(lines))
    return _with_names(text, renamed), list(_by_hand(text))


def _now(module: str, name: str) -> tuple[str, str]:
    """Where a name is imported from now, and what it is called."""
    if (changed := NAMES.get((module, name))) is not None:
        return changed.rpartition(".")[0], changed.rpartition(".")[2]
    parts = module.split(".")
    for end in range(len(parts), 1, -1):
        if (found := MODULES.get(".".join(parts[:end]))) is not None:
            if found.endswith(".*"):
                return ".".join([found[:-2], *parts[end:]]), name
            return found, name
    return module, name


def _with_names(text: str, renamed: Mapping[str, str]) -> str:
    """The text with names replaced that are not attributes of something."""
    if not renamed:
        return text
    lines = text.splitlines(keepends=True)
    before = ""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string in renamed and before != ".":
            found.append(token)
        before = token.string
    for token in reversed(found):
        row, begin = token.start
        line = lines[row - 1]
        lines[row - 1] = line[:begin] + renamed[token.string] + line[token.end[1] :]
    return "".join(lines)


def _by_hand(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(attr=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if name in ATTRIBUTES:
                    yield node.lineno, ATTRIBUTES[name]
            case ast.keyword(arg=str(name)) if name in ATTRIBUTES:
                yield node.value.lineno, ATTRIBUTES[name]
            case ast.Import(names=names):
                for alias in names:
                    if alias.name.startswith("dynamo_core."):
                        yield node.lineno, f"import {alias.name}: import the names that are needed from dynamo_core"


def main(words: list[str]) -> int:
    """Rewrites every Python file below a folder in place; 0 if nothing is left to do by hand."""
    if len(words) != 1 or not Path(words[0]).is_dir():
        print("usage: python -m dynamo_testing.migrate FOLDER", file=sys.stderr)  # noqa: T201 - a command
        return 2
    left = 0
    for path in sorted(Path(words[0]).rglob("*.py")):
        if any(part.startswith(".") or part == "site-packages" for part in path.relative_to(words[0]).parts):
            continue
        before = path.read_text()
        after, by_hand = migrated(before)
        if after != before:
            path.write_text(after)
            print(f"{path}: rewritten")  # noqa: T201
        for line, advice in by_hand:
            left += 1
            print(f"{path}:{line}: look at {advice}")  # noqa: T201
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
