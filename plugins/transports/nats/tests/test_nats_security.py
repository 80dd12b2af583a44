"""Logging in, TLS, and settings that make no sense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nkeys  # type: ignore[import-untyped]
import pytest
from dynamo_core.errors import ConfigError
from dynamo_plugin_transport_nats.config import NatsConfig
from dynamo_plugin_transport_nats.transport import NatsTransport
from dynamo_telemetry import Metrics
from dynamo_testing.servers.certificates import make_certificates
from dynamo_testing.settings_checks import listed_settings, refused_settings, unusable_certificates
from dynamo_testing.transport.handlers import greet

SECRET = "s3cret-of-the-tests"
README = (Path(__file__).parents[1] / "README.md").read_text()


# Logging in.


def seed() -> tuple[str, str]:
    """Return the seed of a user key, and its public half."""
    pair = nkeys.from_seed(nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER))
    return bytes(pair.seed).decode(), bytes(pair.public_key).decode()


WAYS = {
    "password": (
        f'authorization {{ user: "worker", password: "{SECRET}" }}',
        {"user": "worker", "password": SECRET},
        {"user": "worker", "password": "wrong-" + SECRET},
    ),
    "token": (f'authorization {{ token: "{SECRET}" }}', {"token": SECRET}, {"token": "wrong-" + SECRET}),
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_correct_login_is_accepted(bench: Any, way: str) -> None:
    settings, right, _ = WAYS[way]
    nats = bench.server(settings)
    server, client = (
        await bench.transport(nats, **right),
        await bench.transport(nats, **right),
    )

    assert await greet(server, client) == b"hello"


@pytest.mark.parametrize("way", WAYS)
async def test_a_wrong_login_fails_the_start_without_showing_the_secret(bench: Any, way: str) -> None:
    settings, right, wrong = WAYS[way]
    nats = bench.server(settings)
    expected = f"does not let us in .*check `{next(iter(right))}`"

    with pytest.raises(ConfigError, match=expected) as caught:
        await bench.transport(nats, start_timeout=60, **wrong)

    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_missing_login_is_a_config_error_that_lists_the_options(bench: Any) -> None:
    nats = bench.server(WAYS["token"][0])

    with pytest.raises(ConfigError, match=r"does not let us in .*set `user` and `password`, `token`"):
        await bench.transport(nats)


async def test_an_nkey_logs_in_without_a_password(bench: Any) -> None:
    private, public = seed()
    nats = bench.server(f"authorization {{ users: [ {{ nkey: {public} }} ] }}")
    server = await bench.transport(nats, nkey=private)
    client = await bench.transport(nats, nkey=private)

    assert await greet(server, client) == b"hello"


def test_a_key_that_is_none_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError, match="nkey: is not the seed") as caught:
        NatsTransport(NatsConfig.model_validate({"nkey": "SUNOTAKEYATALL"}), Metrics())

    assert "SUNOTAKEYATALL" not in str(caught.value)


def test_a_credentials_file_is_checked_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"credentials: .*no\.creds.* cannot be read"):
        NatsTransport(NatsConfig(credentials=tmp_path / "no.creds"), Metrics())
    (tmp_path / "bad.creds").write_text("hello")
    with pytest.raises(ConfigError, match=r"is not a \.creds file"):
        NatsTransport(NatsConfig(credentials=tmp_path / "bad.creds"), Metrics())


def test_secrets_do_not_show() -> None:
    config = NatsConfig.model_validate({"user": "u", "password": SECRET})

    assert SECRET not in repr(config)
    assert SECRET not in config.model_dump_json()


# TLS.


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return ca.crt, and server and client certificates for 127.0.0.1 that it signed."""
    return make_certificates(tmp_path_factory.mktemp("certificates"), server="IP:127.0.0.1", client="IP:127.0.0.1")


def encrypted(folder: Path, *, verify: bool = False) -> str:
    return (
        f'tls {{ cert_file: "{folder}/server.crt", key_file: "{folder}/server.key", ca_file: "{folder}/ca.crt", '
        f"verify: {str(verify).lower()} }}"
    )


@pytest.mark.parametrize("verify", [False, True])
async def test_calls_over_tls(bench: Any, certificates: Path, verify: bool) -> None:
    nats = bench.server(encrypted(certificates, verify=verify) + "\n" + WAYS["password"][0])
    tls = {"ca": certificates / "ca.crt"}
    if verify:
        tls |= {"cert": certificates / "client.crt", "key": certificates / "client.key"}
    options = {"servers": [nats.url], "tls": tls, **WAYS["password"][1]}
    server, client = await bench.pair(**options)

    assert await greet(server, client) == b"hello"


async def test_an_untrusted_server_certificate_is_refused(bench: Any, certificates: Path) -> None:
    nats = bench.server(encrypted(certificates))

    with pytest.raises(ConfigError, match=r"transport\.tls: no encrypted connection with 127.*check `ca`"):
        await bench.transport(nats, tls={})


async def test_a_password_is_never_sent_to_a_server_that_does_not_encrypt(bench: Any, certificates: Path) -> None:
    said: list[bytes] = []
    wire = await bench.wire(lambda passing: said.append(passing.body), raw=True)

    with pytest.raises(ConfigError, match="the server does not ask for TLS"):
        await bench.transport(
            servers=[f"nats://127.0.0.1:{wire.port}"],
            tls={"ca": certificates / "ca.crt"},
            user="worker",
            password=SECRET,
        )

    assert said
    assert not any(SECRET.encode() in part for part in said)


async def test_without_a_login_tls_is_insisted_on_too(bench: Any, nats_server: Any) -> None:
    with pytest.raises(ConfigError, match="the server does not ask for TLS"):
        await bench.transport(servers=[nats_server.url.replace("nats://", "tls://")])


test_a_certificate_file_that_cannot_be_used_is_named = unusable_certificates(
    lambda tls: NatsTransport(NatsConfig.model_validate({"tls": tls}), Metrics())
)


# Settings.


test_settings_that_make_no_sense_are_refused_with_a_remedy = refused_settings(
    NatsConfig,
    [
        ({"servers": []}, "at least 1"),
        ({"servers": ["http://x:1"]}, "neither nats://host:port nor tls"),
        ({"servers": ["nats://"]}, "is not host:port"),
        ({"servers": ["nats://x:port"]}, "has a port that is none"),
        ({"servers": ["nats://x/path"]}, "is not host:port"),
        ({"prefix": "a b"}, "words of letters"),
        ({"prefix": "a.>"}, "words of letters"),
        ({"prefix": ".a"}, "words of letters"),
        ({"user": "u"}, "`user` and `password` belong together"),
        ({"user": "u", "password": "p", "token": "t"}, "`user` and `token` are different ways"),
        ({"tls": {"cert": "c"}}, "`cert` and `key` belong together"),
        ({"silence": 1.0}, "at least twice"),
        ({"unknown": 1}, "Extra inputs"),
        ({"servers": ["nats://user:hunter2@host:4222"]}, "set `user` and `password`"),
    ],
    secret="hunter2",
)


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ("host", "nats://host:4222"),
        ("host:1", "nats://host:1"),
        ("tls://host", "tls://host:4222"),
        ("nats://[::1]:7", "nats://[::1]:7"),
    ],
)
def test_addresses_are_completed(given: str, full: str) -> None:
    assert NatsConfig(servers=[given]).servers == [full]


# The page.


test_the_readme_lists_every_setting_with_its_default = listed_settings(README, NatsConfig)
