"""Login and TLS options of the connection: no secret leaves before it is encrypted."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynamo_core import client_context, read_file
from dynamo_core.errors import ConfigError
from pydantic import SecretStr

from dynamo_plugin_transport_nats.config import NatsConfig, NatsTls


class NotEncrypted(ConfigError):
    """The settings ask for TLS, and the server does not offer it."""


class Login:
    """The login of every connection, made from the settings.

    Raises:
        ConfigError: a file or a key cannot be used, or a distribution is missing that it takes.
    """

    def __init__(self, config: NatsConfig) -> None:
        self._config = config
        self._context = (
            client_context(config.tls or NatsTls(), "transport.tls", only_ca=True) if config.wants_tls else None
        )
        if config.nkey is not None or config.credentials is not None:
            _check_keys(config)

    def attempt(self) -> tuple[dict[str, Any], Callable[[], None]]:
        """Return options of one connection, and what to call once it stands.

        Both raise `NotEncrypted` if it should be encrypted and is not.
        """
        context, config = self._context, self._config
        before = 0 if context is None else context.session_stats()["connect_good"]

        def check() -> None:
            if context is not None and context.session_stats()["connect_good"] == before:
                raise NotEncrypted(
                    "transport.tls: the server does not ask for TLS, so nothing would be encrypted: configure it "
                    "there, or remove `tls` and tls:// here"
                )

        def held_back(secret: SecretStr) -> Callable[[], str]:
            def tell() -> str:
                check()
                return secret.get_secret_value()

            return tell

        options: dict[str, Any] = {}
        if context is not None:
            options["tls"] = context
            if config.tls is not None and config.tls.server_name is not None:
                options["tls_hostname"] = config.tls.server_name
        if config.user is not None and config.password is not None:
            options |= {"user": config.user, "password": held_back(config.password)}
        if config.token is not None:
            options["token"] = held_back(config.token)
        if config.nkey is not None:
            options["nkeys_seed_str"] = config.nkey.get_secret_value()
        if config.credentials is not None:
            options["user_credentials"] = str(config.credentials)
        return options, check


def _check_keys(config: NatsConfig) -> None:
    which = "nkey" if config.credentials is None else "credentials"
    if importlib.util.find_spec("nkeys") is None:
        raise ConfigError(
            f"transport.{which}: needs a distribution that is not installed: "
            'pip install "dynamo-plugin-transport-nats[nkeys]"'
        )
    if config.nkey is not None:
        _check_seed(config.nkey)
    if config.credentials is not None:
        _check_credentials(config.credentials)


def _check_seed(seed: SecretStr) -> None:
    import nkeys  # type: ignore[import-untyped]

    try:
        nkeys.from_seed(bytearray(seed.get_secret_value().strip().encode())).wipe()
    except Exception:
        # Whatever is wrong with it: the reason may hold a part of the key, so it is not told.
        raise ConfigError("transport.nkey: is not the seed of a user key, which begins with SU") from None


def _check_credentials(path: Path) -> None:
    try:
        text = read_file(path, pipe=False).data.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"transport.credentials: {str(path)!r} cannot be read: {reason}", cause=error) from error
    if "BEGIN NATS USER JWT" not in text or "BEGIN USER NKEY SEED" not in text:
        raise ConfigError(
            f"transport.credentials: {str(path)!r} is not a .creds file, with a JWT and a seed of a user in it"
        )
