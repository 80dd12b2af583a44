"""Binding of listener addresses: the error when one cannot be had, and the port that several processes share."""

from __future__ import annotations

import errno
import socket
from types import TracebackType

from dynamo_core.errors import ConfigError

#: How often another free port is tried, for a name with several addresses of which one has that port taken.
_TRIES = 20


def bind_error(name: str, host: str, port: int, port_option: str, error: Exception) -> str:
    """Return a sentence for the operator; `name` is the listener's, `port_option` what moves it to another port."""
    where = f"the {name} listener cannot listen on {host or '*'}:{port}"
    another = f"choose another port with {port_option}"
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        return f"{where}: the port is in use; end the process that holds it, or {another}"
    if number in (errno.EACCES, errno.EPERM):
        return f"{where}: not allowed; {another} (1024 or above)"
    if isinstance(error, OverflowError):
        return f"{where}: not a port; {another} (0 to 65535)"
    if isinstance(error, (socket.gaierror, UnicodeError)) or number == errno.EADDRNOTAVAIL:
        return f"{where}: this host has no such address; set host to one of its own, such as 127.0.0.1 or 0.0.0.0"
    return f"{where}: {error}; choose another address, or {another}"


class SharedPort:
    """Holds an address, without listening, while it is entered, for the processes that share it.

    `port` 0 takes any free one.

    The processes bind it too, with ``SO_REUSEPORT``, and the kernel gives each new connection to one of those that
    listen. That option would let any process of this user join, so the address is bound without it first: where
    another one has it, this fails. Only then it is opened to others that set the option; a server that does not share,
    and another supervisor, which tries as this one did, are kept out from then on, even while no frontend runs.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self.port = port
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> SharedPort:
        """Take the address.

        Raises:
            ConfigError: it is in use, or cannot be bound.
        """
        try:
            self._hold()
        except (OSError, OverflowError, UnicodeError) as error:
            self._release()
            raise ConfigError(bind_error("frontend", self._host, self.port, "--http-port", error)) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _hold(self) -> None:
        found = socket.getaddrinfo(self._host or None, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for _ in range(_TRIES):
            try:
                port = self.port
                for family, _, _, _, address in dict.fromkeys(found):
                    port = self._bind(family, (address[0], port, *address[2:]))
            except OSError as error:
                self._release()
                if self.port or error.errno != errno.EADDRINUSE:
                    raise
            else:
                self.port = port
                return
        raise OSError(errno.EADDRINUSE, "no port is free on all addresses")

    def _bind(self, family: int, address: tuple[object, ...]) -> int:
        holder = socket.socket(family, socket.SOCK_STREAM)
        self._sockets.append(holder)
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        # Connections of an earlier run may still be closing; they do not count.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(address)
        # But a process that comes later with this option must not get in, so it is taken back.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        return int(holder.getsockname()[1])

    def _release(self) -> None:
        while self._sockets:
            self._sockets.pop().close()
