"""Hooks that announce what happens to engines, instances and client requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_core.hookspecs import hookspec

if TYPE_CHECKING:
    from dynamo_core.contracts.engine import EngineConfig, WorkerConfig
    from dynamo_core.protocol.records import Instance, RequestRecord


@hookspec
def dynamo_engine_started(worker: WorkerConfig, engine_config: EngineConfig, worker_id: int) -> None:
    """Observe that an engine is ready, before it is registered.

    Called once per worker in its own process; the returned value is ignored; an exception is logged and changes
    nothing.
    """


@hookspec
def dynamo_engine_draining(worker: WorkerConfig, worker_id: int) -> None:
    """Observe that a worker has left discovery and finishes what it has.

    Called once per worker in its own process; the returned value is ignored; an exception is logged and changes
    nothing.
    """


@hookspec
def dynamo_engine_stopped(worker: WorkerConfig, worker_id: int) -> None:
    """Observe that an engine has been cleaned up.

    Called once per worker in its own process; the returned value is ignored; an exception is logged and changes
    nothing.
    """


@hookspec
def dynamo_instance_added(instance: Instance, model: str) -> None:
    """Observe that a worker can be routed to.

    Called in each frontend process when discovery shows it; the returned value is ignored; an exception is logged and
    changes nothing.
    """


@hookspec
def dynamo_instance_removed(instance: Instance, model: str) -> None:
    """Observe that a worker is gone from discovery.

    Called in each frontend process; the returned value is ignored; an exception is logged and changes nothing.
    """


@hookspec
def dynamo_request_finished(record: RequestRecord) -> None:
    """Observe that a client request has ended, well or badly.

    Called once per request that reached a model, after all it held was released; the returned value is ignored; an
    exception is logged and changes nothing. The access log is the built-in listener.
    """
