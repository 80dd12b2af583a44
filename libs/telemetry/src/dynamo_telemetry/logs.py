"""Logging: one line per record, as JSON or as text, written by a thread so that a slow terminal never stops a request.

Lines written inside a request carry its ids. Control characters are escaped and long messages are cut. Text that looks
like an API key, or like a login in an address, is masked. Prompts are never logged on purpose.
"""

from __future__ import annotations

import copy
import logging
import queue
import re
import sys
import threading
from contextlib import suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from typing import Any, TextIO, cast

import msgspec
from dynamo_core import tracing
from dynamo_core.errors import ConfigError

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}

#: How many lines may wait for the writer; more are dropped and counted.
MAX_WAITING = 10_000
#: Characters of a message, and of a traceback, that are kept.
MAX_MESSAGE = 8_192
MAX_TRACEBACK = 32_768
#: Seconds that `shutdown_logging` waits for the writer.
FLUSH_TIMEOUT = 2.0


class LogContext(msgspec.Struct, frozen=True, gc=False):
    """The ids of the request that a log line belongs to."""

    request_id: str
    x_request_id: str | None = None


#: The request that is being worked on.
context: ContextVar[LogContext | None] = ContextVar("dynamo_log", default=None)


class RequestScope:
    """While it is entered, log lines carry the ids of a request. It may be held across awaits and yields."""

    __slots__ = ("_context", "_token")

    def __init__(self, request_id: str, x_request_id: str | None) -> None:
        self._context = LogContext(request_id, x_request_id)
        self._token: Token[LogContext | None] | None = None

    def __enter__(self) -> None:
        self._token = context.set(self._context)

    def __exit__(self, *exc: object) -> None:
        token, self._token = self._token, None
        try:
            if token is not None:
                context.reset(token)
        except ValueError:
            # A generator may be closed by another task; its context has nothing to restore.
            return


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_CONTROLS.update({0x09: "\\t", 0x0A: "\\n", 0x0D: "\\r", 0x2028: "\\u2028", 0x2029: "\\u2029"})
# Characters that turn the direction of writing make a line show another text than it has.
_BIDI_CONTROLS = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROLS.update({code: f"\\u{code:04x}" for code in _BIDI_CONTROLS})
# Half a surrogate pair cannot be written as UTF-8.
_CONTROLS.update({code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)})
_KEY = re.compile(r"(?i)\b(bearer\s+)[^\s\"',;]+|\b(sk-)[a-z0-9_-]{8,}")
#: Logins and keys in addresses, which libraries repeat in their errors. The repeats are bounded: lines may be long.
_LOGIN = re.compile(r"""(://)[^\s"'<>]{1,512}@""")
_QUERY = re.compile(
    r"(?i)([?&;][\w.-]{0,40}(?:key|token|secret|pass|pwd|credential|signature)[\w.-]{0,40}=)"
    r"""[^\s&;"'<>]+"""
)


def escape(text: str) -> str:
    """Return the text with control characters visible, so that it cannot forge a line or steer a terminal."""
    return text.translate(_CONTROLS)


def _clean(text: str, limit: int) -> str:
    if len(text) > limit:
        text = f"{text[:limit]}… ({len(text) - limit} characters more)"
    if "://" in text or "?" in text:
        text = _QUERY.sub(r"\1***", _LOGIN.sub(r"\1***@", text))
    return _KEY.sub(lambda match: f"{match.group(1) or match.group(2)}***", text)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _ids(record: logging.LogRecord) -> dict[str, Any]:
    ids: dict[str, Any] = {}
    trace = getattr(record, "dynamo_trace", None)
    if isinstance(trace, tracing.TraceContext):
        ids["trace_id"] = trace.trace_id
        ids["span_id"] = trace.span_id
    request = getattr(record, "dynamo_request", None)
    if isinstance(request, LogContext):
        ids["request_id"] = request.request_id
        if request.x_request_id is not None:
            ids["x_request_id"] = request.x_request_id
    fields = getattr(record, "fields", None)
    if isinstance(fields, dict):
        ids.update(fields)
    return ids


def _plain(value: Any) -> Any:
    return escape(value) if isinstance(value, str) else value


class JsonFormatter(logging.Formatter):
    """One JSON object per line. ``extra={"fields": {…}}`` adds fields of the record's own.

    `process` is a field of every line, if there is a name for this process.
    """

    _encoder = msgspec.json.Encoder(enc_hook=str)

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = {"process": process} if process else {}

    def format(self, record: logging.LogRecord) -> str:
        row = {key: _plain(value) for key, value in _ids(record).items()}
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "target": escape(record.name),
            **self._process,
            # The encoder escapes the common controls; only what it lets through is made visible here.
            "message": _clean(record.getMessage(), MAX_MESSAGE).translate(_UNSEEN_BY_JSON),
        }
        for key, value in row.items():
            line.setdefault(key, value)
        if trace := _traceback(record):
            line["exception"] = trace.translate(_UNSEEN_BY_JSON)
        return self._encoder.encode(line).decode()


_UNSEEN_BY_JSON = {code: text for code, text in _CONTROLS.items() if code >= 0x7F}


class TextFormatter(logging.Formatter):
    """``time LEVEL target: message key=value``; a traceback follows, indented. `process` goes before the target."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = f"[{process}] " if process else ""

    def format(self, record: logging.LogRecord) -> str:
        message = escape(_clean(record.getMessage(), MAX_MESSAGE))
        line = f"{_time(record)} {record.levelname:<7} {self._process}{escape(record.name)}: {message}"
        for key, value in _ids(record).items():
            if value is not None:
                line += f" {key}={_shown(value)}"
        if trace := _traceback(record):
            line += "".join(f"\n    {escape(part)}" for part in trace.split("\n"))
        return line


def _shown(value: Any) -> str:
    text = str(value)
    if text and not re.search(r"[\s\"=]", text):
        return escape(text)
    return escape(msgspec.json.encode(text.translate(_CONTROLS)).decode())


_formatter = logging.Formatter()


def _traceback(record: logging.LogRecord) -> str:
    return _clean(record.exc_text, MAX_TRACEBACK) if record.exc_text else ""


class _Filter(logging.Filter):
    """Lines of this framework and its plugins as the level says; those of other libraries from WARNING."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or record.name.startswith("dynamo")


class _Handler(QueueHandler):
    """Hands records to the writer, with the ids of the request that is being worked on. Never blocks."""

    def __init__(self, waiting: queue.Queue[Any]) -> None:
        super().__init__(waiting)
        self._dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        # Arguments and frames are resolved now: they may change, or keep much alive, until the writer sees them.
        record = copy.copy(record)
        record.msg = record.getMessage()
        record.args = None
        if record.exc_info and record.exc_info[0] is not None and not record.exc_text:
            record.exc_text = _formatter.formatException(record.exc_info)
        record.exc_info = None
        record.dynamo_trace = tracing.current.get()
        record.dynamo_request = context.get()
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            if self._dropped:
                text = f"{self._dropped} log lines were dropped: the output is too slow"
                self.queue.put_nowait(logging.LogRecord(__name__, logging.WARNING, "", 0, text, None, None))
                self._dropped = 0
            self.queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1


class _Listener(QueueListener):
    """The writer. It can be stopped with a full queue: the waiting lines are dropped then."""

    def enqueue_sentinel(self) -> None:
        waiting = cast(queue.Queue[Any], self.queue)
        try:
            waiting.put(None, timeout=FLUSH_TIMEOUT)
        except queue.Full:
            with suppress(queue.Empty):
                while True:
                    waiting.get_nowait()
            waiting.put_nowait(None)


@dataclass(slots=True)
class _Active:
    handler: _Handler
    listener: _Listener
    previous_level: int


_active: _Active | None = None


def configure_logging(level: str, json: bool, stream: TextIO | None = None, *, process: str = "") -> None:
    """Start logging to `stream` (stderr if None), in place of what an earlier call set up.

    `level` is one of debug, info, warning, error, critical; loggers of other libraries speak from warning. `process`
    names this process in every line, where several write to one place.

    Raises:
        ConfigError: the level is unknown.
    """
    global _active
    number = _number(level)
    shutdown_logging()
    writer = logging.StreamHandler(stream if stream is not None else sys.stderr)
    writer.setFormatter(JsonFormatter(process) if json else TextFormatter(process))
    waiting: queue.Queue[Any] = queue.Queue(MAX_WAITING)
    handler = _Handler(waiting)
    handler.addFilter(_Filter())
    listener = _Listener(waiting, writer)
    listener.start()
    root = logging.getLogger()
    _active = _Active(handler, listener, root.level)
    root.addHandler(handler)
    root.setLevel(number)


def set_level(level: str) -> None:
    """Change the level while logging runs.

    Raises:
        ConfigError: it is unknown.
    """
    logging.getLogger().setLevel(_number(level))


def _number(level: str) -> int:
    number = LEVELS.get(level.lower())
    if number is None:
        raise ConfigError(f"log.level: {level!r} is not a level; use one of {', '.join(LEVELS)}")
    return number


def shutdown_logging() -> bool:
    """Write what waits, for at most `FLUSH_TIMEOUT` seconds, and take this logging away. Safe twice.

    False if the output is stuck: then the interpreter would wait for its writer at exit, without end.
    """
    global _active
    if _active is None:
        return True
    active, _active = _active, None
    root = logging.getLogger()
    root.removeHandler(active.handler)
    root.setLevel(active.previous_level)
    active.handler.close()
    # The listener's own stop waits without a deadline, and the output may be a pipe without a reader.
    stopper = threading.Thread(target=active.listener.stop, name="log-flush", daemon=True)
    stopper.start()
    stopper.join(FLUSH_TIMEOUT)
    return not stopper.is_alive()
