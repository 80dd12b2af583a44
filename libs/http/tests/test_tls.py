"""TLS on a listener: who is spoken to, who is not, and which file is to blame."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from contextlib import AbstractAsyncContextManager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from dynamo_core.certificates import ClientTls, ServerTls, client_context, expiry_remark, server_context
from dynamo_core.contracts.http_route import HttpRoute
from dynamo_core.errors import ConfigError
from dynamo_http.listener import Listener
from pydantic import ValidationError

from libs.http.tests.serving import serving as plain
from libs.http.tests.serving import until

REQUEST = b"GET /hello HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


class Pki:
    """Certificates of one authority, made with the openssl command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._run("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                  "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")  # fmt: skip
        (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        for name in ("server", "client"):
            self._run("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}",
                      "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
            self._run("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                      "-days", "2", "-extfile", "names", "-out", f"{name}.pem")  # fmt: skip
        self._run("ec", "-in", "server.key", "-aes256", "-passout", "pass:secret", "-out", "encrypted.key")
        both = (folder / "server.pem").read_text() + (folder / "server.key").read_text()
        (folder / "both.pem").write_text(both)
        (folder / "nonsense.pem").write_text("no certificate")
        (folder / "index").touch()
        (folder / "ca.cnf").write_text(
            "[ca]\ndefault_ca=d\n[d]\ndatabase=index\nnew_certs_dir=.\nrand_serial=yes\ndefault_md=sha256\npolicy=p\n"
            "unique_subject=no\n[p]\ncommonName=supplied\n"
        )
        for name, begin, end in (("expired", "2020", "2021"), ("future", "2090", "2091"), ("expiring", "2020", "")):
            end = f"{end}0101000000Z" if end else f"{datetime.now(UTC) + timedelta(days=3):%Y%m%d%H%M%SZ}"
            self._run("ca", "-batch", "-config", "ca.cnf", "-in", "server.csr", "-cert", "ca.pem", "-keyfile", "ca.key",
                      "-startdate", f"{begin}0101000000Z", "-enddate", end, "-out", f"{name}.pem")  # fmt: skip

    def _run(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=self.folder)

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def settings(self, cert: str = "server.pem", key: str | None = "server.key", ca: str | None = None) -> ServerTls:
        return ServerTls(
            cert=self.path(cert), key=key and self.path(key), client_ca=self.path(ca) if ca is not None else None
        )

    def client(self, *, certificate: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.path("ca.pem"))
        if certificate:
            context.load_cert_chain(self.path("client.pem"), self.path("client.key"))
        return context


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is not installed")
    return Pki(tmp_path_factory.mktemp("pki"))


async def hello(request: web.Request) -> web.Response:
    return web.Response(text=f"hello over {request.scheme}")


def serving(settings: ServerTls, **options: Any) -> AbstractAsyncContextManager[Listener]:
    ssl = server_context(settings, "frontend.tls")
    return plain(HttpRoute("GET", "/hello", hello), **({"max_connections": 10, "ssl": ssl} | options))


async def get(listener: Listener, context: ssl.SSLContext | None) -> bytes:
    """Return what a client is told until the connection is closed."""
    async with asyncio.timeout(5):
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port, ssl=context)
        try:
            writer.write(REQUEST)
            return await reader.read()
        finally:
            writer.close()


@pytest.mark.parametrize(("cert", "key"), [("server.pem", "server.key"), ("both.pem", None)])
async def test_requests_are_answered_over_tls(pki: Pki, cert: str, key: str | None) -> None:
    async with serving(pki.settings(cert, key)) as listener:
        answers = await asyncio.gather(*(get(listener, pki.client()) for _ in range(8)))

        assert listener.url.startswith("https://127.0.0.1:")
    assert all(answer.endswith(b"hello over https") for answer in answers)


async def test_tls_works_on_uvloop(pki: Pki) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def scene() -> bytes:
        async with serving(pki.settings(), header_timeout=1) as listener:
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
            writer.write(REQUEST)
            with suppress(ConnectionError):
                await reader.read()
            writer.close()
            await until(lambda: listener.unsafe_connections == 1)
            return await get(listener, pki.client())

    def run() -> bytes:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(scene())

    assert (await asyncio.to_thread(run)).endswith(b"hello over https")


async def test_plain_connections_are_cut_and_free_their_place(pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(pki.settings(), max_connections=3, header_timeout=30) as listener:
        for number in range(10):
            with suppress(ConnectionError):
                assert b"hello" not in await get(listener, None)
            await until(lambda number=number: listener.unsafe_connections == number + 1)  # type: ignore[misc]

        assert (await get(listener, pki.client())).endswith(b"hello over https")
    (line,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "has TLS, and a client at 127.0.0.1 speaks plain HTTP" in line


async def test_half_a_handshake_is_cut_at_the_deadline(pki: Pki) -> None:
    async with serving(pki.settings(), header_timeout=0.2) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(b"\x16\x03\x01")
        async with asyncio.timeout(5):
            with_nothing = await reader.read()
        writer.close()

        assert with_nothing == b""
        assert listener.unsafe_connections == 1


async def test_half_a_header_over_tls_is_cut_at_the_deadline(pki: Pki) -> None:
    async with serving(pki.settings(), header_timeout=0.5) as listener:
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.port, ssl=pki.client())
            writer.write(REQUEST[:20])
            answer = await reader.read()
        writer.close()

        assert answer.startswith(b"HTTP/1.1 408 ")
        assert listener.timed_out_connections == 1


async def test_a_listener_can_be_closed_in_the_middle_of_a_handshake(pki: Pki) -> None:
    async with serving(pki.settings(), header_timeout=30) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(b"\x16\x03\x01")
        await asyncio.sleep(0.01)

        await asyncio.wait_for(listener.aclose(), 5)

        async with asyncio.timeout(5):
            try:
                rest = await reader.read()
            except ConnectionResetError:
                rest = b""
        assert rest == b""
        writer.close()


async def test_a_client_ca_admits_only_its_own_certificates(pki: Pki) -> None:
    async with serving(pki.settings(ca="ca.pem")) as listener:
        known = await get(listener, pki.client(certificate=True))
        try:
            stranger = await get(listener, pki.client())
        except (ssl.SSLError, ConnectionError):
            stranger = b""

    assert known.endswith(b"hello over https")
    assert b"hello" not in stranger


async def test_old_tls_is_refused(pki: Pki) -> None:
    context = server_context(pki.settings(), "frontend.tls")

    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("cert", "key", "ca", "says"),
    [
        ("absent.pem", "server.key", None, r"frontend\.tls\.cert: .*absent\.pem cannot be read: No such file"),
        ("server.pem", "absent.key", None, r"frontend\.tls\.key: .*absent\.key cannot be read"),
        ("server.pem", "server.key", "absent.pem", r"frontend\.tls\.client_ca: .*absent\.pem cannot be read"),
        ("nonsense.pem", "server.key", None, r"frontend\.tls\.cert: .*nonsense\.pem holds no certificate"),
        ("server.pem", "nonsense.pem", None, r"frontend\.tls\.key: .*nonsense\.pem holds no private key"),
        ("server.pem", None, None, r"frontend\.tls\.cert: .*server\.pem holds no private key"),
        ("server.pem", "client.key", None, r"frontend\.tls\.key: .*client\.key holds the private key of another cert"),
        ("server.pem", "encrypted.key", None, r"frontend\.tls\.key: .*encrypted\.key holds an encrypted private key"),
        ("server.pem", "server.key", "nonsense.pem", r"frontend\.tls\.client_ca: .*nonsense\.pem holds no cert"),
    ],
)
def test_files_that_cannot_be_used_are_named_with_their_key(
    pki: Pki, cert: str, key: str | None, ca: str | None, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        server_context(pki.settings(cert, key, ca), "frontend.tls")


@pytest.mark.parametrize(
    ("cert", "says"),
    [
        ("expired.pem", r"the certificate .*expired\.pem expired on 2021-01-01 00:00 UTC; renew it$"),
        ("future.pem", r"the certificate .*future\.pem is valid from 2090-01-01 00:00 UTC only; correct the clock"),
    ],
)
def test_a_certificate_that_is_not_valid_now_is_named_with_its_key(pki: Pki, cert: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"^admin\.tls\.cert: {says}"):
        server_context(pki.settings(cert), "admin.tls")
    with pytest.raises(ConfigError, match=rf"^discovery\.tls\.cert: {says}"):
        client_context(ClientTls(cert=Path(pki.path(cert)), key=Path(pki.path("server.key"))), "discovery.tls")


def test_a_certificate_that_expires_soon_is_warned_about(pki: Pki) -> None:
    assert server_context(pki.settings("expiring.pem"), "admin.tls") is not None
    assert "expires on" in expiry_remark(pki.settings("expiring.pem"))
    # One of two days is new, as those of a mesh are.
    assert expiry_remark(pki.settings()) == ""
    assert expiry_remark(ServerTls()) == ""


@pytest.mark.parametrize("name", ["cert", "key", "client_ca"])
def test_a_certificate_is_read_from_a_regular_file(pki: Pki, name: str) -> None:
    endless = pki.settings(ca="ca.pem").model_copy(update={name: "/dev/zero"})

    with pytest.raises(ConfigError, match=rf"^frontend\.tls\.{name}: /dev/zero cannot be read: it is no regular file"):
        server_context(endless, "frontend.tls")


def test_without_a_certificate_there_is_no_tls() -> None:
    assert server_context(ServerTls(), "frontend.tls") is None
    with pytest.raises(ValidationError, match="without cert"):
        ServerTls(key="server.key")
