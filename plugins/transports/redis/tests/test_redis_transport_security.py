"""Logging in, TLS, and settings that make no sense."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from dynamo_core.errors import CannotConnect, ConfigError
from dynamo_plugin_transport_redis.config import RedisConfig
from dynamo_plugin_transport_redis.transport import RedisTransport
from dynamo_telemetry import Metrics
from dynamo_testing.servers.certificates import make_certificates
from dynamo_testing.settings_checks import listed_settings, refused_settings, unusable_certificates
from dynamo_testing.transport.handlers import greet

SECRET = "s3cret-of-the-tests"
README = (Path(__file__).parents[1] / "README.md").read_text()


# Logging in.


async def test_a_correct_password_is_accepted(bench: Any) -> None:
    broker = bench.server("--requirepass", SECRET)
    options = {"url": broker.url, "password": SECRET}

    assert await greet(*(await bench.pair(**options))) == b"hello"


@pytest.mark.parametrize("login", [{"password": "wrong"}, {}, {"username": "nobody", "password": SECRET}])
async def test_a_wrong_login_fails_the_start_without_showing_the_password(bench: Any, login: dict[str, str]) -> None:
    broker = bench.server("--requirepass", SECRET)

    with pytest.raises(ConfigError, match=r"transport\.password: Redis at 127.* refuses the login") as caught:
        await bench.transport(broker, start_timeout=60, **login)

    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)


def acl() -> list[str]:
    """Return the permissions that the page names."""
    found = re.search(r"ACL SETUSER dynamo (.*?)```", README, re.S)
    assert found is not None
    return found[1].replace("\\", " ").replace(">…", f">{SECRET}").split()


async def test_the_permissions_of_the_page_suffice_for_calls_and_events(bench: Any) -> None:
    broker = bench.server("--user", "dynamo", *acl())
    options = {"url": broker.url, "username": "dynamo", "password": SECRET, "prefix": "dynamo"}

    assert await greet(*(await bench.pair(**options))) == b"hello"


@pytest.mark.parametrize("missing", ["+publish", "+subscribe", "&dynamo:*"])
async def test_a_missing_permission_is_a_config_error(bench: Any, missing: str) -> None:
    assert missing in acl()
    broker = bench.server("--user", "dynamo", *(word for word in acl() if word != missing))

    with pytest.raises(ConfigError, match=r"transport\.username: .* lets the user do too little") as caught:
        await bench.transport(broker, username="dynamo", password=SECRET, prefix="dynamo", start_timeout=60)

    assert "README" in str(caught.value)


def test_secrets_do_not_show() -> None:
    config = RedisConfig.model_validate({"username": "u", "password": SECRET})

    assert SECRET not in repr(config)
    assert SECRET not in config.model_dump_json()


# TLS.


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return ca.crt, and server and client certificates for 127.0.0.1 that it signed."""
    return make_certificates(
        tmp_path_factory.mktemp("certificates"), server="IP:127.0.0.1", client="IP:127.0.0.1", other="DNS:elsewhere"
    )


def encrypted(folder: Path, name: str = "server", *, verify: bool = False) -> list[str]:
    files = ["--tls-cert-file", f"{folder}/{name}.crt", "--tls-key-file", f"{folder}/{name}.key"]
    return [*files, "--tls-ca-cert-file", f"{folder}/ca.crt", "--tls-auth-clients", "yes" if verify else "no"]


@pytest.mark.parametrize("verify", [False, True])
async def test_calls_over_tls(bench: Any, certificates: Path, verify: bool) -> None:
    broker = bench.server(*encrypted(certificates, verify=verify), "--requirepass", SECRET, tls=True)
    tls = {"ca": certificates / "ca.crt"}
    if verify:
        tls |= {"cert": certificates / "client.crt", "key": certificates / "client.key"}
    options = {"url": broker.url, "tls": tls, "password": SECRET}

    assert await greet(*(await bench.pair(**options))) == b"hello"


async def test_an_untrusted_server_certificate_is_refused(bench: Any, certificates: Path) -> None:
    broker = bench.server(*encrypted(certificates), tls=True)

    with pytest.raises(ConfigError, match=r"transport\.tls\.ca: Redis at 127.* name the authority"):
        await bench.transport(url=broker.url)


async def test_a_server_with_the_certificate_of_another_host_is_refused(bench: Any, certificates: Path) -> None:
    broker = bench.server(*encrypted(certificates, "other"), tls=True)

    with pytest.raises(ConfigError, match=r"transport\.tls\.ca: .*127\.0\.0\.1"):
        await bench.transport(broker, tls={"ca": certificates / "ca.crt"})


async def test_a_password_is_never_sent_to_a_server_that_does_not_encrypt(bench: Any, certificates: Path) -> None:
    said: list[bytes] = []
    wire = await bench.wire(lambda passing: said.append(passing.body), raw=True)

    with pytest.raises((ConfigError, CannotConnect)):
        await bench.transport(
            url=f"redis://127.0.0.1:{wire.port}",
            tls={"ca": certificates / "ca.crt"},
            password=SECRET,
            start_timeout=0.2,
            connect_timeout=1.0,
        )

    assert said
    assert not any(SECRET.encode() in part for part in said)


test_a_certificate_file_that_cannot_be_used_is_named = unusable_certificates(
    lambda tls: RedisTransport(RedisConfig.model_validate({"tls": tls}), Metrics())
)


# Settings.


test_settings_that_make_no_sense_are_refused_with_a_remedy = refused_settings(
    RedisConfig,
    [
        ({"url": "http://x:1"}, "neither redis://host:port nor rediss"),
        ({"url": "redis://"}, "is not redis://host:port"),
        ({"url": "redis://x:port"}, "has a port that is none"),
        ({"url": "redis://x/1"}, "channels belong to none"),
        ({"url": "redis://x?a=b"}, "is not redis://host:port"),
        ({"prefix": "a b"}, "words of letters"),
        ({"prefix": "a:*"}, "words of letters"),
        ({"prefix": ""}, "words of letters"),
        ({"username": "u"}, "`username` needs a `password`"),
        ({"tls": {"cert": "c"}}, "`cert` and `key` belong together"),
        ({"silence": 1.0}, "at least twice"),
        ({"unknown": 1}, "Extra inputs"),
        ({"url": "redis://user:hunter2@host:6379"}, "set `username` and `password`"),
    ],
    secret="hunter2",
)


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ("host", "redis://host:6379"),
        ("host:1", "redis://host:1"),
        ("rediss://host", "rediss://host:6379"),
        ("valkey://[::1]:7", "valkey://[::1]:7"),
    ],
)
def test_addresses_are_completed(given: str, full: str) -> None:
    assert RedisConfig(url=given).url == full


# The page.


test_the_readme_lists_every_setting_with_its_default = listed_settings(README, RedisConfig)
