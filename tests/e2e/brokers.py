"""Real NATS, Redis and etcd as child processes on the loopback, and what each profile needs of them."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
from pathlib import Path
from typing import Any, ClassVar, Self

import redis
from dynamo_testing.servers.ports import free_port
from dynamo_testing.servers.server_process import ServerProcess, server_binary

#: The profiles of `examples/profiles/dynamo.yaml`. The one without processes is last.
PROFILES = ("tcp-file", "tcp-redis", "nats-etcd", "redis-redis", "inproc")


def program(*names: str, package: str) -> str:
    """Return the path of the first of these programs that is there.

    Without any the test is skipped, and fails on CI.
    """
    # Debian keeps servers where users do not look.
    return server_binary(*names, folders=":/usr/sbin:/usr/local/bin", package=package)


class Broker(ServerProcess):
    """A server that can be killed, and started again on its port. `with` runs one."""

    SCHEME: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / f"{type(self).__name__.lower()}.log")
        self.port = free_port()
        #: What starts it.
        self._command: list[str] = []

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"{self.SCHEME}://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def command(self) -> list[str]:
        return self._command


class Nats(Broker):
    """It keeps nothing."""

    SCHEME = "nats"

    def __init__(self, folder: Path, settings: str = "") -> None:
        super().__init__(folder)
        self._monitor = free_port()
        settings_file = folder / "nats.conf"
        self._command = [program("nats-server", package="nats-server"), "-c", str(settings_file)]
        settings_file.write_text(
            f'host: "127.0.0.1"\nport: {self.port}\nhttp: "127.0.0.1:{self._monitor}"\n{settings}\n'
        )

    def answers(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
            return connection.recv(4) == b"INFO"

    def received(self) -> int:
        """Return how many messages were sent to it."""
        return int(_json(self._monitor, "/varz")["in_msgs"])


class Redis(Broker):
    """It has no disk: killed and started again, it is empty."""

    SCHEME = "redis"

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(folder)
        self._command = [program("redis-server", "valkey-server", package="redis-server")]
        self._command += ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *options]

    def answers(self) -> bool:
        socket.create_connection(("127.0.0.1", self.port), 1).close()
        return True

    def received(self) -> int:
        """Return how many messages were published."""
        with redis.Redis(port=self.port) as client:
            return int(client.info("commandstats")["cmdstat_publish"]["calls"])

    def wipe(self) -> None:
        """Remove all that it holds."""
        with redis.Redis(port=self.port) as client:
            client.flushall()


class Etcd(Broker):
    """One member of a cluster of one. It keeps its data when it is killed."""

    SCHEME = "http"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        peer = f"http://127.0.0.1:{free_port()}"
        self._data = folder / "etcd"
        self._command = [
            program("etcd", package="etcd-server"), "--name", "one", "--data-dir", str(self._data),
            "--initial-cluster", f"one={peer}",
            "--listen-client-urls", self.url, "--advertise-client-urls", self.url,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--heartbeat-interval", "20", "--election-timeout", "200",
        ]  # fmt: skip

    def answers(self) -> bool:
        return bool(_json(self.port, "/health")["health"] == "true")

    def wipe(self) -> None:
        """Replace it by another one, which knows nothing."""
        self.kill()
        shutil.rmtree(self._data)
        self.start()


def _json(port: int, path: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


class Servers:
    """The servers that a profile needs. `with` runs them."""

    def __init__(self, profile: str, folder: Path) -> None:
        """`folder` is theirs, and that of the discovery in files.

        Raises:
            pytest.skip.Exception: a server is not installed.
        """
        self.profile = profile
        transport, _, discovery = profile.partition("-")
        shared = Redis(folder) if "redis" in profile else None
        #: What carries the calls.
        self.broker: Nats | Redis | None = Nats(folder) if transport == "nats" else None
        if transport == "redis":
            self.broker = shared
        #: What knows the workers.
        self.store: Redis | Etcd | None = Etcd(folder) if discovery == "etcd" else shared
        self._transport, self._discovery = transport, discovery
        self._files = folder / "discovery"

    def wipe(self) -> None:
        """Empty the store."""
        if self.store is not None:
            self.store.wipe()
        # What a process writes meanwhile may stand in the way, and is gone with the next look.
        while self._files.exists():
            shutil.rmtree(self._files, ignore_errors=True)

    def transport(self, url: str | None = None) -> dict[str, Any]:
        """Return the settings of the transport; `url` is another way to its broker."""
        if isinstance(self.broker, Nats):
            return {"use": "nats", "servers": [url or self.broker.url]}
        if self.broker is not None:
            return {"use": "redis", "url": url or self.broker.url}
        return {"use": self._transport}

    def discovery(self, *, quick: bool = True) -> dict[str, Any]:
        """Return the settings of the discovery; `quick` to see which process has died."""
        times = {"ttl": 2, "timeout": 0.5, "poll": 0.25} if quick else {}
        if isinstance(self.store, Etcd):
            return {"use": "etcd", "endpoints": [self.store.url]} | times
        if self.store is not None:
            return {"use": "redis", "url": self.store.url} | times
        if self._discovery == "file":
            return {"use": "file", "path": str(self._files)} | ({"ttl": 2} if quick else {})
        return {"use": "memory"}

    def options(self) -> list[str]:
        """Return both as options of the command, over a profile's."""
        sections = {"transport": self.transport(), "discovery": self.discovery()}
        values = [
            (f"{section}.{key}", value)
            for section, settings in sections.items()
            for key, value in settings.items()
            if key != "use"
        ]
        return [word for key, value in values for word in ("--set", f"{key}={json.dumps(value)}")]

    def _all(self) -> list[Broker]:
        return [*{server: None for server in (self.store, self.broker) if server is not None}]

    def __enter__(self) -> Self:
        try:
            for server in self._all():
                server.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for server in self._all():
            server.kill()
