"""Why an address cannot be listened on, and what to do about it."""

from __future__ import annotations

import errno
import socket


def bind_error(name: str, host: str, port: int, port_option: str, error: Exception) -> str:
    """A sentence for the operator; `name` is the listener's, `port_option` what moves it to another port."""
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
