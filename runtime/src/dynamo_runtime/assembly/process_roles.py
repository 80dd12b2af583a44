"""The role of a process: everything, a frontend, or one replica of one worker."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_core.contracts.engine import LLMEngine, WorkerConfig
from dynamo_core.errors import ConfigError

from dynamo_runtime.settings import Settings

#: ``--only frontend``, and the beginning of ``--only workers.NAME``.
FRONTEND = "frontend"
WORKERS = "workers."


@dataclass(frozen=True, slots=True)
class HostedEngine:
    """An engine that was made elsewhere and is handed over, with the settings of its worker."""

    engine: LLMEngine
    config: WorkerConfig


@dataclass(frozen=True, slots=True)
class Role:
    """The parts of the config that this process runs. `replica` is set for a part in a process of its own.

    `processes` is how many frontends share the port of this one. With `hosted` the only worker's engine is not one that
    the config picks.
    """

    frontend: bool
    workers: tuple[str, ...]
    replica: int | None = None
    hosted: HostedEngine | None = None
    processes: int = 1

    @property
    def whole(self) -> bool:
        """Whether this process is everything that was asked for, or supervises it."""
        return self.frontend and self.replica is None

    @property
    def shares_port(self) -> bool:
        """Whether other frontends listen on the port of this one."""
        return self.processes > 1

    @property
    def name(self) -> str:
        """A word for logs: ``frontend``, ``frontend-1``, ``workers.mock-0``, or empty for everything."""
        if self.whole:
            return ""
        if self.frontend:
            return FRONTEND if self.processes == 1 else f"{FRONTEND}-{self.replica}"
        return f"{WORKERS}{self.workers[0]}-{self.replica}"


def role_of(settings: Settings, only: str | None, replica: int | None = None) -> Role:
    """Return the role that ``--only`` asks for; without it, everything.

    Several frontends are one only with its `replica`.

    Raises:
        ConfigError: there is no such part.
    """
    if only is None:
        return Role(True, tuple(settings.workers))
    if only == FRONTEND:
        processes = settings.frontend.processes
        if replica is None and processes > 1:
            return Role(True, ())
        return Role(True, (), replica or 0, processes=processes)
    name = only.removeprefix(WORKERS)
    if not only.startswith(WORKERS) or name not in settings.workers:
        known = ", ".join([FRONTEND, *(WORKERS + worker for worker in settings.workers)])
        raise ConfigError(f"--only {only}: there is no such part; this config has {known}")
    return Role(False, (name,), replica or 0)


def role_for(hosted: HostedEngine) -> Role:
    """Return the role of a process that runs one engine which was handed over."""
    return Role(False, (hosted.config.worker,), hosted.config.replica, hosted)
