"""Where a record may lead: no process is connected to outside of the networks that are allowed."""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from dynamo_core import Endpoint, EngineContext, ServedContext
from dynamo_core.errors import CannotConnect
from dynamo_core.protocol import Instance
from dynamo_plugin_transport_tcp import outbound_allowlist
from dynamo_plugin_transport_tcp.address import Address, own_address
from dynamo_plugin_transport_tcp.config import TcpConfig
from dynamo_plugin_transport_tcp.outbound_allowlist import AllowedNetworks, own_networks
from dynamo_plugin_transport_tcp.transport import TcpTransport
from dynamo_telemetry import Metrics
from pydantic import ValidationError

Make = Callable[..., TcpTransport]

BYTES = Endpoint("bytes", int, bytes)


async def hello(request: int, ctx: ServedContext) -> AsyncGenerator[bytes, None]:
    async def items() -> AsyncGenerator[bytes, None]:
        yield b"hello"

    return items()


def at(host: str, there: Address) -> Instance:
    return Instance(instance_id=7, address={"tcp": str(Address(host, there.port, there.nonce))})


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("10.1.2.3", True),
        ("172.31.0.1", True),
        ("192.168.1.1", True),
        ("100.64.0.1", True),
        ("::1", True),
        ("fd12::1", True),
        ("fe80::1%eth0", True),
        ("::ffff:10.1.2.3", True),
        ("::ffff:203.0.113.5", False),
        ("172.32.0.1", False),
        ("203.0.113.5", False),
        ("169.254.169.254", False),
        ("100.128.0.1", False),
        ("2001:db8::1", False),
        ("0.0.0.0", False),
        ("255.255.255.255", False),
    ],
)
def test_private_networks_are_allowed_unless_others_are_named(
    monkeypatch: pytest.MonkeyPatch, address: str, allowed: bool
) -> None:
    monkeypatch.setattr(outbound_allowlist, "own_networks", tuple)

    assert AllowedNetworks(None).allow(address) is allowed
    named = AllowedNetworks(["203.0.113.0/24", "2001:db8::/32"])
    assert named.allow(address) is (address in ("203.0.113.5", "::ffff:203.0.113.5", "2001:db8::1"))


def test_the_networks_of_this_machine_are_those_of_its_addresses() -> None:
    own = own_address()
    if own is None:
        pytest.skip("this machine has no network")

    found = own_networks()

    assert any(ipaddress.ip_address(own) in network for network in found if network.version == 4)
    assert all(network.prefixlen for network in found), "not the whole of the internet"


@pytest.mark.parametrize("table", [b"", b"Iface\tDestination\n", None])
def test_a_machine_without_routing_tables_has_only_its_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, table: bytes | None
) -> None:
    for name in ("_ROUTES", "_ADDRESSES6"):
        path = tmp_path / name
        if table is not None:
            path.write_bytes(table)
        monkeypatch.setattr(outbound_allowlist, name, path)

    assert len(own_networks()) <= 1


async def test_a_worker_outside_of_the_allowed_networks_is_not_connected_to(
    make_transport: Make, recorder: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server, client = make_transport(), make_transport(allowed_networks=["198.51.100.0/24"])
    there = Address.parse((await server.serve(7, BYTES, hello)).address["tcp"])

    for host in ("127.0.0.1", "localhost", "127.0.0.1"):
        with pytest.raises(CannotConnect, match=r"outside of `transport.allowed_networks`"):
            await client.call(at(host, there), BYTES, 0, EngineContext("r"), recorder())

    told = [record.getMessage() for record in caplog.records if "allowed_networks" in record.getMessage()]
    assert len(told) == 1
    assert len(server._registry.links) == 0


async def test_a_host_is_resolved_once_and_the_checked_address_is_connected(
    make_transport: Make, recorder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client, sink = make_transport(), make_transport(), recorder()
    there = Address.parse((await server.serve(7, BYTES, hello)).address["tcp"])
    asked: list[str] = []

    async def changing(host: str, port: int) -> list[str]:
        asked.append(host)
        # The first answer has an address that is refused, too; a second one would lead elsewhere.
        return ["203.0.113.5", "127.0.0.1"] if len(asked) == 1 else ["203.0.113.5"]

    monkeypatch.setattr(outbound_allowlist, "lookup", changing)

    await client.call(at("worker.example", there), BYTES, 0, EngineContext("r"), sink)

    assert await sink.end() is None
    assert asked == ["worker.example"]


async def test_the_first_answering_address_is_used(make_transport: Make, recorder: Any) -> None:
    server, client, sink = make_transport(bind="127.0.0.1:0"), make_transport(), recorder()
    there = Address.parse((await server.serve(7, BYTES, hello)).address["tcp"])

    # Also ::1, where the machine has it, at which nothing listens.
    await client.call(at("localhost", there), BYTES, 0, EngineContext("r"), sink)

    assert await sink.end() is None


async def test_a_handshake_that_fails_is_not_counted_as_a_connection(
    make_transport: Make, recorder: Any, encrypted: dict[str, Any]
) -> None:
    metrics = Metrics()
    server, client = make_transport(), make_transport(metrics, connect_timeout=0.5, **encrypted)
    there = Address.parse((await server.serve(7, BYTES, hello)).address["tcp"])

    with pytest.raises(CannotConnect):
        await client.call(at("127.0.0.1", there), BYTES, 0, EngineContext("r"), recorder())

    assert metrics.gauge("dynamo_tcp_connections", "", ("side",)).labels("caller").value == 0


@pytest.mark.parametrize("text", ["10.0.0.1/8", "everywhere", "10.0.0.0/33", ""])
def test_an_invalid_network_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValidationError, match="is not a network such as"):
        TcpConfig.model_validate({"allowed_networks": [text]})


@pytest.mark.parametrize(
    ("settings", "remarked"),
    [
        ({}, False),
        ({"bind": "0.0.0.0:7100", "insecure": True}, False),
        ({"advertise": "worker.example"}, False),
        ({"advertise": "203.0.113.5:7100"}, True),
        ({"advertise": "203.0.113.5", "allowed_networks": ["203.0.113.0/24"]}, False),
        ({"allowed_networks": ["203.0.113.0/24"]}, True),
    ],
)
def test_settings_with_which_frontends_would_not_reach_the_workers_are_remarked_on(
    settings: dict[str, Any], remarked: bool
) -> None:
    remarks = TcpConfig.model_validate(settings).remarks()

    assert len(remarks) == remarked
    assert all("allowed_networks" in remark for remark in remarks)
