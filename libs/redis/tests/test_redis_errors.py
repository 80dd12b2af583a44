"""What is told when a server cannot be used, and what waiting would not mend."""

from __future__ import annotations

from pathlib import Path

import pytest
from dynamo_core.errors import CannotConnect, ConfigError
from dynamo_redis import Fault, RedisSettings, client_options, config_error, connection_factory, explain
from redis.asyncio.connection import SSLConnection
from redis.exceptions import (
    AuthenticationError,
    InvalidResponse,
    NoPermissionError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

SETTINGS = RedisSettings.model_validate({"url": "redis://store:1", "username": "me", "password": "hunter2"})
WHERE = "Redis at store:1"


@pytest.mark.parametrize(
    ("error", "fault", "message", "setting"),
    [
        (NoPermissionError("may not"), Fault.DENIED, f"{WHERE} lets the user do too little: may not", "username"),
        (
            ResponseError("ERR The user executing the script can't run this"),
            Fault.DENIED,
            f"{WHERE} lets the user do too little: ERR The user",
            "username",
        ),
        (ResponseError("ACL failure in script: x"), Fault.DENIED, f"{WHERE} lets the user do too little", "username"),
        (AuthenticationError("wrong"), Fault.LOGIN, f"{WHERE} refuses the login: wrong", "password"),
        (
            ResponseError("Protocol error: unauthenticated multibulk length"),
            Fault.LOGIN,
            f"{WHERE} refuses the login",
            "password",
        ),
        (
            InvalidResponse("b'HTTP'"),
            Fault.PROTOCOL,
            r"this is no Redis server: store:1 answers in another protocol \(b'HTTP'\)",
            "url",
        ),
        (
            RedisConnectionError("certificate verify failed"),
            Fault.UNTRUSTED,
            f"{WHERE} is not trusted: certificate",
            "tls.ca",
        ),
        (OSError("CERTIFICATE_VERIFY_FAILED"), Fault.UNTRUSTED, f"{WHERE} is not trusted", "tls.ca"),
        (OSError("[SSL: WRONG_VERSION_NUMBER]"), Fault.PLAIN, f"{WHERE} does not speak TLS", "tls"),
        (ResponseError("DB index is out of range"), Fault.DATABASE, f"{WHERE} does not serve: DB index", "database"),
        (ResponseError("Invalid Database"), Fault.DATABASE, f"{WHERE} does not serve: Invalid", "database"),
        (RedisConnectionError("refused.\n"), Fault.OTHER, f"{WHERE} does not serve: refused$", None),
        (OSError("no route"), Fault.OTHER, f"{WHERE} cannot be reached: no route", None),
        (TimeoutError(), Fault.OTHER, f"{WHERE} cannot be reached: TimeoutError", None),
    ],
)
def test_each_fault_is_classified_and_names_its_setting(
    error: Exception, fault: Fault, message: str, setting: str | None
) -> None:
    failure = explain(SETTINGS, error)
    mistake = config_error(failure, "discovery")

    assert failure.fault is fault
    assert failure.__cause__ is error
    assert failure.refused is (fault in (Fault.DENIED, Fault.LOGIN))
    with pytest.raises(CannotConnect, match=f"^{message}"):
        raise failure
    if setting is None:
        assert mistake is None
    else:
        assert isinstance(mistake, ConfigError)
        assert str(mistake).startswith(f"discovery.{setting}: {failure}; ")


def test_an_error_of_another_kind_may_pass() -> None:
    assert config_error(CannotConnect("anything"), "discovery") is None


def test_a_password_that_the_server_repeats_is_left_out() -> None:
    failure = explain(SETTINGS, ResponseError("ERR unknown command 'AUTH', with args beginning with: 'hunter2'"))

    assert "with args beginning with" in str(failure)
    assert "hunter2" not in str(failure)


# Connections.


def test_options_hold_the_address_the_login_and_the_time_limits() -> None:
    options = client_options(SETTINGS, "discovery", database=3, timeout=1.5)

    assert (options["host"], options["port"], options["db"]) == ("store", 1, 3)
    assert (options["username"], options["password"]) == ("me", "hunter2")
    assert options["socket_timeout"] == options["socket_connect_timeout"] == 1.5
    assert "ssl" not in options


async def test_connections_of_a_factory_have_no_deadline_for_answers() -> None:
    connection = connection_factory(SETTINGS, "transport", connect_timeout=2.0)()

    assert not isinstance(connection, SSLConnection)
    assert connection.socket_timeout is None
    assert connection.socket_connect_timeout == 2.0


async def test_encrypted_connections_check_the_server() -> None:
    settings = RedisSettings(url="rediss://store")

    connection = connection_factory(settings, "transport", connect_timeout=2.0)()
    options = client_options(settings, "discovery", timeout=1.0)

    assert isinstance(connection, SSLConnection)
    assert connection.check_hostname
    assert options["ssl"] is True
    assert options["ssl_cert_reqs"] == "required"


@pytest.mark.parametrize("key", ["ca", "cert"])
def test_a_file_that_cannot_be_used_is_named_with_its_setting(tmp_path: Path, key: str) -> None:
    missing = tmp_path / "no"
    tls = {"ca": missing} if key == "ca" else {"cert": missing, "key": missing}
    settings = RedisSettings.model_validate({"tls": tls})

    with pytest.raises(ConfigError, match=r"^admission\.shared\.tls.*cannot be used.*PEM"):
        client_options(settings, "admission.shared", timeout=1.0)
    with pytest.raises(ConfigError, match=r"^transport\.tls.*cannot be used.*PEM"):
        connection_factory(settings, "transport", connect_timeout=1.0)
