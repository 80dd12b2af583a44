"""The child process for long work: it renders templates and checks answers, in the template environment.

It is started by its path and imports nothing of this package, so that it is there quickly and small. Requests and
answers are JSON, each after its length; `render_processes.py` is the other end.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, TypeVar

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from jinja2.parser import Parser

EnvironmentT = TypeVar("EnvironmentT", bound=ImmutableSandboxedEnvironment)

#: How the length of a message is written.
LENGTH = struct.Struct("!Q")
#: Bytes of address space; a conversation of the largest body that is taken by default needs half of it.
MAX_MEMORY = 2 << 30
#: Bytes of memory after which the process is given up: memory that was used once is not always given back.
_WORN = 512 << 20
_KILOBYTE = 1024
#: Compiled templates that are kept.
_KEPT = 16
#: Characters of what is told about a text that is not as its schema says.
_LONGEST = 500
#: The option of prctl(2).
_SET_PARENT_DEATH_SIGNAL = 1
#: The exit code of a process that needed more memory than it may have.
OUT_OF_MEMORY = 3


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant said, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - the name and the form are jinja2's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the marked block, with variables of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [nodes.Scope(body).set_lineno(line)]


def environment(cls: type[EnvironmentT]) -> EnvironmentT:
    """Return an environment of this class, as chat templates expect it."""
    made = cls(trim_blocks=True, lstrip_blocks=True, autoescape=False, extensions=[LoopControlExtension, _Generation])
    made.filters["tojson"] = tojson
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _raise, "strftime_now": time.strftime}
    made.globals.update(helpers)
    return made


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes of jinja2's own filter, which models have never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Job(msgspec.Struct, tag=True):
    """A template to render, and its variables. `seconds` is its limit of processor time."""

    source: str
    values: dict[str, Any]
    seconds: float


class SchemaJob(msgspec.Struct, tag=True):
    """Texts that are to be JSON, and the schema of each. `seconds` is the processor time that it may take."""

    claims: list[tuple[str, dict[str, Any] | bool]]
    seconds: float


class Checked(msgspec.Struct):
    """The first text that breaks its schema: its place, and why. `fault` is why it could not be decided.

    The process ends after the `last` answer.
    """

    at: int | None = None
    violation: str | None = None
    fault: str | None = None
    seconds: float = 0.0
    last: bool = False


class Rendered(msgspec.Struct):
    """The text, or why the template has refused the values, or is no template.

    `seconds` is the processor time that it took. The process ends after the `last` answer.
    """

    text: str | None = None
    refusal: str | None = None
    fault: str | None = None
    seconds: float = 0.0
    last: bool = False


class _Renderer:
    def __init__(self) -> None:
        self._environment = environment(ImmutableSandboxedEnvironment)
        self._templates: dict[str, jinja2.Template] = {}

    def answer(self, job: Job) -> Rendered:
        try:
            template = self._template(job.source)
        except MemoryError:
            raise
        except Exception as error:
            return Rendered(fault=_words(error))
        try:
            text = template.render(job.values)
            text.encode()
        except MemoryError:
            raise
        except Exception as error:
            return Rendered(refusal=_words(error))
        return Rendered(text)

    def _template(self, source: str) -> jinja2.Template:
        template = self._templates.get(source)
        if template is None:
            if len(self._templates) >= _KEPT:
                self._templates.clear()
            template = self._templates[source] = self._environment.from_string(source)
        return template


def _check(job: SchemaJob) -> Checked:
    for at, (text, schema) in enumerate(job.claims):
        try:
            violation = _violation(text, schema)
        except MemoryError:
            raise
        except Exception as error:
            return Checked(at, fault=_words(error)[:_LONGEST])
        if violation is not None:
            return Checked(at, violation[:_LONGEST])
    return Checked()


def _violation(text: str, schema: dict[str, Any] | bool) -> str | None:
    from jsonschema import Draft202012Validator
    from referencing import Registry

    try:
        value = json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        return f"it is not JSON: {_words(error)}"
    # Without a registry of its own it would load what a schema refers to from the network.
    for found in Draft202012Validator(schema, registry=Registry()).iter_errors(value):
        return f"{found.json_path}: {found.message}"
    return None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no value")


def _words(error: Exception) -> str:
    return str(error).encode(errors="replace").decode()


def _limit(limit: int, soft: int, hard: int) -> None:
    # Not every system has every limit; where one is missing the parent's deadline is left.
    with suppress(ValueError, OSError):
        resource.setrlimit(limit, (soft, hard))


def _limit_time(seconds: float) -> None:
    """Let the process use so much processor time; then the kernel ends it, whatever it does."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + seconds) + 1, resource.RLIM_INFINITY)


def _memory() -> int:
    """Return bytes of memory that the process has now."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        # Not on Linux. There this number would begin with that of the process that started this one.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KILOBYTE


def read(pipe: IO[bytes]) -> bytes | None:
    """Return the next message; None at the end."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = pipe.read(size)
    return body if len(body) == size else None


def write(pipe: IO[bytes], message: bytes) -> None:
    """Send a message."""
    pipe.write(LENGTH.pack(len(message)))
    pipe.write(message)
    pipe.flush()


def _end_with_parent() -> None:
    """Have the system kill this process when the parent is gone, whatever it does then; only Linux can.

    To the system the parent is the thread that started it, one of a pool that lives as long as the event loop.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def main() -> None:
    """Answer until the other end is closed. Argument: the module that its jobs need, which takes a while to load."""
    # A signal to the whole group is for the parent, which closes the pipe when it needs this process no more.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with_parent()
    _limit(resource.RLIMIT_AS, MAX_MEMORY, MAX_MEMORY)
    _limit(resource.RLIMIT_CORE, 0, 0)
    for module in sys.argv[1:]:
        importlib.import_module(module)
    renderer, last = _Renderer(), False
    # It has started: from here on its time counts.
    write(sys.stdout.buffer, b"")
    while not last and (message := read(sys.stdin.buffer)) is not None:
        job = msgspec.json.decode(message, type=Job | SchemaJob)
        del message
        _limit_time(job.seconds)
        begun = time.process_time()
        answer = renderer.answer(job) if isinstance(job, Job) else _check(job)
        answer.seconds = time.process_time() - begun
        last = answer.last = _memory() > _WORN
        write(sys.stdout.buffer, msgspec.json.encode(answer))


if __name__ == "__main__":
    try:
        main()
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)
