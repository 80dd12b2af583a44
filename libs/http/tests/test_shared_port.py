"""A port that several processes share is kept from everybody else."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest
from dynamo_core.errors import ConfigError
from dynamo_http.binding import SharedPort


def server(port: int, *, share: bool, host: str = "127.0.0.1") -> socket.socket:
    """Return a listening socket as a server makes it."""
    listening = socket.socket()
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind((host, port))
        listening.listen()
    except OSError:
        listening.close()
        raise
    return listening


def test_sharing_processes_bind_and_every_connection_reaches_a_listener() -> None:
    with SharedPort("127.0.0.1", 0) as shared, server(shared.port, share=True) as one:
        with server(shared.port, share=True) as other:
            reached = set()
            for _ in range(100):
                with closing(socket.create_connection(("127.0.0.1", shared.port), timeout=5)):
                    for listening in (one, other):
                        listening.setblocking(False)
                        try:
                            listening.accept()[0].close()
                        except BlockingIOError:
                            continue
                        reached.add(listening)
        with closing(socket.create_connection(("127.0.0.1", shared.port), timeout=5)):
            one.setblocking(True)
            one.settimeout(5)
            one.accept()[0].close()

    assert reached == {one, other}


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_other_servers_cannot_bind_a_shared_port(host: str) -> None:
    with SharedPort("127.0.0.1", 0) as shared, pytest.raises(OSError, match="in use"):
        server(shared.port, share=False, host=host)


def test_a_second_owner_of_a_shared_port_is_refused() -> None:
    with SharedPort("127.0.0.1", 0) as shared, pytest.raises(ConfigError) as raised:
        SharedPort("127.0.0.1", shared.port).__enter__()

    assert f"127.0.0.1:{shared.port}: the port is in use" in str(raised.value)
    assert "--http-port" in str(raised.value)


@pytest.mark.parametrize("share", [False, True])
def test_a_port_in_use_is_refused_even_if_shareable(share: bool) -> None:
    with server(0, share=share) as taken, pytest.raises(ConfigError, match="the port is in use"):
        SharedPort("127.0.0.1", taken.getsockname()[1]).__enter__()


def test_a_port_that_was_left_is_free_again() -> None:
    with SharedPort("127.0.0.1", 0) as shared:
        pass

    with server(shared.port, share=False):
        pass
    with SharedPort("127.0.0.1", shared.port):
        pass


def test_connections_of_an_earlier_run_that_are_still_closing_do_not_count() -> None:
    with server(0, share=True) as earlier:
        port = earlier.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port), timeout=5)
        accepted = earlier.accept()[0]
        # The server closes first, so its end stays in TIME_WAIT.
        accepted.close()
        client.close()

    with SharedPort("127.0.0.1", port):
        pass


def test_a_host_that_is_not_this_one_is_refused_with_its_reason() -> None:
    with pytest.raises(ConfigError, match="this host has no such address"):
        SharedPort("192.0.2.1", 8000).__enter__()


def test_a_name_with_several_addresses_has_one_port_on_all() -> None:
    with SharedPort("localhost", 0) as shared, server(shared.port, share=True):
        assert shared.port > 0
