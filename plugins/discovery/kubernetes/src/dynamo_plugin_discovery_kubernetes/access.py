"""The address of the API server and the identity of this process, from the settings and from the pod."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dynamo_core import ClientTls, client_context, read_file
from dynamo_core.errors import ConfigError

from dynamo_plugin_discovery_kubernetes.config import KubernetesConfig

log = logging.getLogger(__name__)

#: Where Kubernetes mounts the service account of a pod.
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
#: Seconds after which the token is read again: kubelet replaces it long before it ends.
REREAD = 30.0


class Token:
    """A bearer token, perhaps from a file that is replaced from time to time."""

    def __init__(
        self, fixed: str | None, file: Path | None, key: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`key` is the setting that names the file, for errors.

        Raises:
            ConfigError: the file cannot be read.
        """
        self._value = fixed
        self._file = file
        self._clock = clock
        self._read_at = clock()
        if file is not None:
            try:
                self._value = _read(file)
            except OSError as error:
                raise ConfigError(
                    f"{key}: {str(file)!r} cannot be read: {error.strerror}; it must hold the token", cause=error
                ) from error

    def current(self) -> str | None:
        """Return the token; None if there is none."""
        if self._file is not None and self._clock() - self._read_at >= REREAD:
            self._reread(self._file)
        return self._value

    def another(self, refused: str | None) -> bool:
        """Return whether there is another one than the one that was refused."""
        if self._file is not None:
            self._reread(self._file)
        return self._value != refused

    def _reread(self, file: Path) -> None:
        self._read_at = self._clock()
        try:
            self._value = _read(file)
        except OSError as error:
            # While the files are being replaced; the old one is valid for a while.
            log.warning("the token in %s cannot be read, and the one of before is used: %s", file, error.strerror)


@dataclass(frozen=True, slots=True)
class Access:
    """The address and credentials of the API server."""

    url: str
    namespace: str
    #: The pod that is to own the leases, if any.
    pod: str | None
    token: Token
    tls: ssl.SSLContext | None


def find_access(config: KubernetesConfig, environment: Mapping[str, str] = os.environ) -> Access:
    """Combine the settings with what Kubernetes gives the pod. Reads files.

    Raises:
        ConfigError: something is missing, or cannot be used.
    """
    url = config.url or _around(environment)
    account = config.service_account
    if account is None and config.url is None:
        account = SERVICE_ACCOUNT
    return Access(
        url,
        config.namespace or _namespace(account),
        config.pod or (None if account is None else environment.get("POD_NAME") or socket.gethostname()),
        _token(config, account),
        _tls(config, account) if url.startswith("https:") else None,
    )


def _around(environment: Mapping[str, str]) -> str:
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError(
            "discovery.url: this process runs in no pod of Kubernetes (KUBERNETES_SERVICE_HOST is not set); set `url`"
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _token(config: KubernetesConfig, account: Path | None) -> Token:
    if config.token is not None:
        return Token(config.token.get_secret_value(), None, "discovery.token")
    if config.token_file is not None:
        return Token(None, config.token_file, "discovery.token_file")
    certified = config.tls is not None and config.tls.cert is not None
    if account is None or certified:
        return Token(None, None, "discovery.token")
    return Token(None, account / "token", "discovery.service_account")


def _tls(config: KubernetesConfig, account: Path | None) -> ssl.SSLContext:
    tls = config.tls or ClientTls()
    if tls.ca is None and account is not None:
        tls = tls.model_copy(update={"ca": account / "ca.crt"})
    return client_context(tls, "discovery.tls")


def _namespace(account: Path | None) -> str:
    try:
        return "default" if account is None else _read(account / "namespace")
    except OSError as error:
        raise ConfigError(
            f"discovery.namespace: {str(account)!r} does not tell the pod's: {error.strerror}; set `namespace`",
            cause=error,
        ) from error


def _read(file: Path) -> str:
    return read_file(file, pipe=False).data.decode().strip()
