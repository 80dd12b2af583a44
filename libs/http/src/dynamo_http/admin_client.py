"""The client of commands for the operators' routes of a running frontend."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from dynamo_core.errors import ConfigError
from dynamo_core.protocol.decoding import Unreadable, read_json

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

#: Where a frontend is that nothing was said of.
EXAMPLE = "http://127.0.0.1:8000"


def admin_options(command: CommandT) -> CommandT:
    """Add ``--url``, ``--token``, ``--ca`` and ``--timeout``, which `AdminClient.of` takes."""
    decorators = [
        click.option(
            "--url",
            envvar="DYN_ADMIN_URL",
            show_envvar=True,
            help="The frontend: its admin listener, if it has one. Without it this host is asked, on the port that "
            "DYN_HTTP_PORT names, or 8000.",
        ),
        click.option(
            "--token",
            envvar="DYN_ADMIN_TOKEN",
            show_envvar=True,
            help="What the frontend asks operators for, its admin.token.",
        ),
        click.option("--ca", type=click.Path(path_type=Path), help="PEM file with the authority of its certificate."),
        click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=10.0, show_default=True),
    ]
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


@dataclass(frozen=True, slots=True)
class AdminClient:
    """A client of a frontend's operators' routes. Errors name the frontend by the user's setting for it."""

    url: str
    name: str
    token: str | None
    ca: Path | None
    timeout: float

    @classmethod
    def of(
        cls, ctx: click.Context, *, url: str | None, token: str | None, ca: Path | None, timeout: float
    ) -> AdminClient:
        """Return what the options of `admin_options` say.

        Raises:
            ConfigError: the environment names no port.
        """
        if url is not None:
            typed = ctx.get_parameter_source("url") is ParameterSource.COMMANDLINE
            return cls(url, f"{'--url' if typed else 'DYN_ADMIN_URL'} {url}", token, ca, timeout)
        port = os.environ.get("DYN_HTTP_PORT") or ""
        if port and not port.isdecimal():
            raise ConfigError(f"DYN_HTTP_PORT: {port!r} is no port; give --url such as {EXAMPLE}")
        here = f"http://127.0.0.1:{port}" if port else EXAMPLE
        name = f"{here} (from DYN_HTTP_PORT)" if port else f"{here} (--url names another)"
        return cls(here, name, token, ca, timeout)

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Return status and answer of the frontend.

        Raises:
            ConfigError: there is none, or it is something else.
        """
        import ssl

        import aiohttp

        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"{self.name}: is no address of a frontend; give one such as {EXAMPLE}")
        headers = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        try:
            trusted = True if self.ca is None else ssl.create_default_context(cafile=str(self.ca))
        except OSError as error:
            raise ConfigError(f"--ca {self.ca}: cannot be used: {error}") from None
        url = f"{self.url.rstrip('/')}{path}"
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self.timeout)) as session,
                session.request(method, url, json=body, headers=headers, ssl=trusted) as response,
            ):
                text = await response.read()
                status = response.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            # aiohttp's own text speaks of TLS, whether there is any.
            why = str(getattr(error, "os_error", error)) or f"no answer within {self.timeout:g} s"
            raise ConfigError(f"{self.name}: cannot be asked: {why}") from None
        try:
            return status, read_json(text)
        except Unreadable:
            raise ConfigError(f"{self.name}: answered {status}, and not as a frontend does") from None


def reason_of(answer: Any) -> str:
    """Return why the frontend refuses, from its answer."""
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or "the frontend refuses")
