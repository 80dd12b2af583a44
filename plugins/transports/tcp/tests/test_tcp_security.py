"""Settings that would let strangers in are refused; secrets and certificates do what they promise."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from dynamo_core import Endpoint, EngineContext, ServedContext
from dynamo_core.errors import CannotConnect, ConfigError, ConnectionTimeout
from dynamo_core.protocol import Instance
from dynamo_plugin_transport_tcp.address import Address, own_address, split_host_port
from dynamo_plugin_transport_tcp.config import TcpConfig
from dynamo_plugin_transport_tcp.security import CALLER, LISTENER, proof
from dynamo_plugin_transport_tcp.transport import TcpTransport
from dynamo_telemetry import Metrics
from dynamo_testing.settings_checks import refused_settings
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

Make = Callable[..., TcpTransport]

SECRET = "a secret of some length"
BYTES = Endpoint("bytes", int, bytes)


async def hello(request: int, ctx: ServedContext) -> AsyncGenerator[bytes, None]:
    async def items() -> AsyncGenerator[bytes, None]:
        yield b"hello"

    return items()


async def greet(server: TcpTransport, client: TcpTransport, sink: Any) -> list[bytes]:
    served = await server.serve(7, BYTES, hello)
    await client.call(Instance(instance_id=7, address=served.address), BYTES, 0, EngineContext("r"), sink)
    assert await sink.end() is None
    items: list[bytes] = sink.items
    return items


# Settings.


@pytest.mark.parametrize("bind", ["0.0.0.0:0", "[::]:7100", "10.1.2.3:1", "worker.example:7100"])
def test_an_address_that_others_reach_needs_a_secret_or_certificates(bind: str) -> None:
    with pytest.raises(ValidationError, match=r"set `secret` or `tls.client_ca`.*`insecure: true`"):
        TcpConfig(bind=bind)

    TcpConfig.model_validate({"bind": bind, "secret": SECRET})
    TcpConfig(bind=bind, insecure=True)
    TcpConfig.model_validate({"bind": bind, "tls": {"cert": "c", "key": "k", "client_ca": "a"}})
    with pytest.raises(ValidationError):
        TcpConfig.model_validate({"bind": bind, "tls": {"cert": "c", "key": "k"}})


@pytest.mark.parametrize("bind", ["127.0.0.1:0", "localhost:7100", "[::1]:7100", "127.8.8.8:1"])
def test_loopback_needs_neither(bind: str) -> None:
    assert TcpConfig(bind=bind).bind == bind


test_settings_that_make_no_sense_are_refused_with_a_remedy = refused_settings(
    TcpConfig,
    [
        ({"bind": "127.0.0.1"}, "has no port"),
        ({"bind": "127.0.0.1:http"}, "is not a port"),
        ({"bind": ":80"}, "names no host"),
        ({"advertise": "worker:0"}, "port 0 cannot be reached"),
        ({"secret": "short"}, "openssl rand"),
        ({"silence": 1.5}, "at least twice"),
        ({"max_frame_mb": 0}, "greater than or equal to 1"),
    ],
)


def test_the_secret_is_not_shown() -> None:
    config = TcpConfig.model_validate({"secret": SECRET})

    assert SECRET not in repr(config) + str(config) + config.model_dump_json()


async def test_an_address_in_use_is_one_line(make_transport: Make) -> None:
    address = (await make_transport().serve(7, BYTES, hello)).address["tcp"].split("/")[0]

    with pytest.raises(ConfigError, match=r"^transport\.bind: cannot listen on .*in use") as caught:
        await make_transport(bind=address).serve(7, BYTES, hello)

    assert "\n" not in str(caught.value)


async def test_the_advertised_address_is_published(make_transport: Make) -> None:
    host = await make_transport(advertise="worker-3.example").serve(7, BYTES, hello)
    both = await make_transport(advertise="[fd00::3]:99").serve(7, BYTES, hello)
    own = await make_transport(bind="0.0.0.0:0", secret=SECRET, advertise=None if own_address() else "x").serve(
        7, BYTES, hello
    )

    assert Address.parse(host.address["tcp"]).host == "worker-3.example"
    assert Address.parse(host.address["tcp"]).port > 0
    assert both.address["tcp"].startswith("[fd00::3]:99/")
    assert Address.parse(own.address["tcp"]).host != "0.0.0.0"


@given(
    host=st.one_of(st.ip_addresses(v=4).map(str), st.ip_addresses(v=6).map(str), st.just("worker.example")),
    port=st.integers(0, 65535),
    nonce=st.binary(min_size=16, max_size=16),
)
def test_an_address_survives_its_text(host: str, port: int, nonce: bytes) -> None:
    assert Address.parse(str(Address(host, port, nonce))) == Address(host, port, nonce)


@given(st.text(max_size=40))
def test_any_other_text_is_a_value_error(text: str) -> None:
    for parse in (Address.parse, split_host_port):
        try:
            parse(text)
        except ValueError:
            continue


# Secrets.


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        (SECRET, None, "asks for a secret"),
        (SECRET, "another secret of length", "secrets of the two processes differ"),
        (None, SECRET, "did not prove"),
    ],
)
async def test_two_that_do_not_know_the_same_secret_do_not(
    make_transport: Make, recorder: Any, theirs: str | None, ours: str | None, message: str
) -> None:
    server, client = make_transport(secret=theirs), make_transport(secret=ours)

    with pytest.raises(CannotConnect, match=message):
        await greet(server, client, recorder())


def test_a_proof_is_of_no_use_elsewhere() -> None:
    nonce, caller, listener, other = b"n" * 16, b"c" * 32, b"l" * 32, b"x" * 32
    mine = proof(b"secret", CALLER, nonce, caller, listener)

    others = [
        proof(b"secret", LISTENER, nonce, caller, listener),
        proof(b"secre", CALLER, nonce, caller, listener),
        proof(b"secret", CALLER, other[:16], caller, listener),
        proof(b"secret", CALLER, nonce, other, listener),
        proof(b"secret", CALLER, nonce, caller, other),
    ]

    assert len(mine) == 32
    assert mine not in others


# Certificates.


async def test_the_name_in_the_certificate_can_be_given(make_transport: Make, recorder: Any, authority: Any) -> None:
    tls = authority.issue("worker.example")
    server = make_transport(tls=tls)

    assert await greet(server, make_transport(tls=tls | {"server_name": "worker.example"}), recorder()) == [b"hello"]
    with pytest.raises(CannotConnect, match=r"(?i)hostname mismatch"):
        await greet_again(server, make_transport(tls=tls | {"server_name": "other.example"}), recorder())


async def greet_again(server: TcpTransport, client: TcpTransport, sink: Any) -> None:
    served = await server.serve(8, BYTES, hello)
    await client.call(Instance(instance_id=8, address=served.address), BYTES, 0, EngineContext("r"), sink)


async def test_certificates_of_other_authorities_and_plain_callers_are_refused(
    make_transport: Make, recorder: Any, authority: Any, strange: Any
) -> None:
    server = make_transport(tls=authority.issue("worker") | {"client_ca": str(authority.ca)})
    served = await server.serve(7, BYTES, hello)
    instance = Instance(instance_id=7, address=served.address)
    foreign = strange.issue("frontend")

    for tls in (foreign, foreign | {"ca": str(authority.ca)}, None):
        client = make_transport(tls=tls, connect_timeout=0.5)
        with pytest.raises((CannotConnect, ConnectionTimeout)):
            await client.call(instance, BYTES, 0, EngineContext("r"), recorder())


def test_unusable_certificate_files_are_one_line(make_transport: Make, tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("no certificate")

    for cert in ("missing.pem", "bad.pem"):
        tls = {"cert": str(tmp_path / cert), "key": str(tmp_path / cert)}
        with pytest.raises(ConfigError, match=r"^transport\.tls: cert .* cannot be used: [^\n]*$"):
            TcpTransport(TcpConfig.model_validate({"tls": tls}), Metrics())
