"""`dynamo serve`: runs an application, or supervises several, until it is asked to end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

from dynamo_core.errors import ConfigError, DynamoError
from dynamo_core.tasks import TaskSet
from dynamo_http.binding import SharedPort
from dynamo_telemetry import logs

from dynamo_runtime import garbage_collector
from dynamo_runtime.assembly.process_lifecycle import Application
from dynamo_runtime.assembly.process_roles import HostedEngine, Role, role_for, role_of
from dynamo_runtime.assembly.process_services import ProcessServices
from dynamo_runtime.assembly.reload import OneReload, Reload, Reloader
from dynamo_runtime.assembly.resolve import Resolved
from dynamo_runtime.processes.control import ParentPipe, supervisor_descriptor
from dynamo_runtime.processes.reload_triggers import ReloadTriggers, has_terminal
from dynamo_runtime.processes.signals import Signals, end_with
from dynamo_runtime.processes.supervised_reload import ChildReload, SupervisedReload, answer_reloads
from dynamo_runtime.processes.supervisor import Supervisor, parts_of, serve_command
from dynamo_runtime.settings import LoadedSettings
from dynamo_runtime.telemetry.export import configure_export, shutdown_export

log = logging.getLogger(__name__)

#: Exit codes: all went well; something failed while starting or running.
OK = 0
FAILED = 1

#: Seconds that a process may take to end beyond the time it gives to running requests.
MARGIN = 15.0
#: Seconds that a process has to end after Ctrl-C while it is still starting: an operator waits, and no request does.
INTERRUPTED = 4.0


def serve(
    loaded: LoadedSettings,
    *,
    only: str | None = None,
    replica: int | None = None,
    arguments: Sequence[str] = (),
    hosted: HostedEngine | None = None,
) -> int:
    """Run what the settings describe until SIGINT or SIGTERM; a second signal cuts what runs, a third ends it at once.

    With a transport that reaches other processes and without `only`, or where several frontends are asked for, this
    process supervises one process per part; each is started with `arguments`, the command line that led here. With
    `hosted` this process is that engine's worker.

    Raises:
        ConfigError: nothing was started.
    """
    settings = loaded.settings
    role = role_of(settings, only, replica) if hosted is None else role_for(hosted)
    logs.configure_logging(settings.log.level, settings.log.json_lines, process=role.name)
    code = FAILED
    try:
        if role.whole and (plane := ProcessServices(loaded, role)).transport.CROSS_PROCESS:
            resolved = plane.resolved
            code = run(lambda: _supervise(loaded, resolved, role, arguments))
        else:
            configure_export(_service_name(role))
            try:
                code = run(lambda: _serve(loaded, role))
            finally:
                shutdown_export()
    except ConfigError:
        logs.shutdown_logging()
        raise
    except DynamoError as error:
        log.error("not started: %s: %s", error.kind, error)
    except BaseException:
        logs.shutdown_logging()
        raise
    return end_with(code)


def _service_name(role: Role) -> str:
    """Return what this process is called in traces, all replicas of a worker alike."""
    if role.whole:
        return "dynamo"
    return "dynamo-frontend" if role.frontend else f"dynamo-worker-{role.workers[0]}"


def run(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Run a coroutine on uvloop if it is installed, else on asyncio's own loop."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _serve(loaded: LoadedSettings, role: Role) -> int:
    descriptor = supervisor_descriptor()
    numbers = (signal.SIGINT, signal.SIGTERM) if descriptor is None else (signal.SIGTERM,)
    async with AsyncExitStack() as stack:
        signals = stack.enter_context(
            Signals(patience(loaded, role), numbers, interrupted=INTERRUPTED, hangups=not has_terminal())
        )
        line = None
        if descriptor is not None:
            line = await stack.enter_async_context(ParentPipe(descriptor, signals))
            line.start()
        signals.doing = lambda: "loading the plugins"
        # Made after the signals are heard: one that comes now ends the process in order, before anything has started.
        try:
            application = Application(loaded, role, stopping=signals.expect_end)
            signals.doing = application.doing
            await stack.enter_async_context(_reloading(application, signals, line))
            broken = False
            started = await _started(application, signals, _grace(loaded, role))
        except ConfigError as error:
            if line is not None:
                line.say_reason(" ".join(str(error).split()))
            raise
        if started or application.busy:
            signals.started()
        if started:
            if line is not None:
                line.say_ready()
            if not role.whole and role.workers:
                # No supervisor starts a process anew that is everything; and a debugger stops its loop.
                _watch_loop(signals, min(loaded.settings.workers[name].stall_exit for name in role.workers))
            async with TaskSet() as tasks:
                tasks.spawn(_announce(application), name="announce")
                broken = await _first(application.failed(), signals.wait(1))
        if broken:
            log.error("this process can serve no request any more; it ends, to be started anew")
            signals.expect_end()
        else:
            log.info("stopping; a second signal cuts running requests, a third ends the process at once")
        if not await _first(application.stop(hurried=signals.hurried), signals.wait(2)):
            log.warning("running requests were cut by a second signal")
    return FAILED if broken else OK


def _watch_loop(signals: Signals, stall: float) -> None:
    if stall:
        signals.watch_loop(stall)


async def _started(application: Application, signals: Signals, grace: float) -> bool:
    """Start everything; whether it runs.

    After a signal nothing begins any more, and an engine that is starting has `grace` seconds to finish, none after
    Ctrl-C; then, or at a second signal, its start is cut.

    Raises:
        ConfigError, DynamoError: it could not be started; what had started has been stopped.
    """
    if not await _first(application.open(), signals.wait(1)) or signals.count:
        return False

    async def patience_is_over() -> None:
        await signals.wait(1)
        application.interrupt()
        if signals.hurried:
            return
        what = "asked to end while starting: %s; it may finish within %g s, a second signal cuts it now"
        log.info(what, application.doing(), grace)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await signals.wait(2)

    await _first(application.start_workers(), patience_is_over())
    return not signals.count


async def _announce(application: Application) -> None:
    """Say when requests can be answered: workers may come long after the port is open."""
    if application.url is not None:
        await application.ready()
        garbage_collector.freeze_loaded()
        log.info("ready for requests at %s", application.url)


@asynccontextmanager
async def _reloading(application: Application, signals: Signals, line: ParentPipe | None) -> AsyncIterator[None]:
    """Let the settings be read again: here, or, for all processes together, at the supervisor."""
    if line is not None:
        child = ChildReload(application.reloader, line)
        application.reload.follow(child)
        line.answer_with(child.answer)
        yield
        return
    async with _triggers(application.reload, application.reloader, signals):
        yield


def _triggers(reload: Reload, reloader: Reloader, signals: Signals) -> ReloadTriggers:
    watch = reloader.loaded.settings.reload == "watch"
    triggers = ReloadTriggers(reload, lambda: reloader.loaded.files, watch=watch)
    signals.hung_up = triggers.hung_up
    return triggers


async def _supervise(loaded: LoadedSettings, resolved: Resolved, role: Role, arguments: Sequence[str]) -> int:
    frontend = loaded.settings.frontend
    # Looked at first, so that a taken port is told before any process starts.
    with SharedPort(frontend.host, frontend.port) as shared:
        if frontend.processes > 1:
            return await _supervise_parts(loaded, resolved, role, arguments, shared.port)
    return await _supervise_parts(loaded, resolved, role, arguments, None)


async def _supervise_parts(
    loaded: LoadedSettings, resolved: Resolved, role: Role, arguments: Sequence[str], port: int | None
) -> int:
    reloader = Reloader(loaded, resolved, role)
    supervisor = Supervisor(
        parts_of(loaded.settings, role.workers, port),
        serve_command(arguments),
        lambda part: patience(reloader.loaded, role_of(reloader.loaded.settings, part.only, part.replica)),
    )
    reload = OneReload(SupervisedReload(reloader, supervisor))
    supervisor.answerer = partial(answer_reloads, reload)
    async with AsyncExitStack() as stack:
        signals = stack.enter_context(Signals(patience(loaded, role) + 2 * MARGIN, hangups=not has_terminal()))
        await supervisor.start()
        await stack.enter_async_context(reload)
        await stack.enter_async_context(_triggers(reload, reloader, signals))
        failed = await _first(_keep(supervisor), signals.wait(1))
        if not failed:
            log.info("stopping; a second signal cuts running requests, a third ends everything at once")
        if not await _first(supervisor.stop(hurried=signals.hurried), signals.wait(2)):
            log.warning("running requests were cut by a second signal")
    if failed:
        # Last of all, after what the other parts had to say of their end.
        raise ConfigError(await supervisor.failed())
    return FAILED if supervisor.unclean else OK


async def _keep(supervisor: Supervisor) -> None:
    await supervisor.failed()


def patience(loaded: LoadedSettings, role: Role) -> float:
    """Return seconds that stopping may take before the process is ended: its own deadlines, and a margin."""
    settings = loaded.settings
    workers = [settings.workers[name] for name in role.workers]
    workers_take = max((worker.grace_period + worker.shutdown_timeout for worker in workers), default=0.0)
    frontend_takes = settings.client.drain_grace + settings.client.shutdown_timeout if role.frontend else 0.0
    return frontend_takes + workers_take + (MARGIN if role.frontend else 0.0)


def _grace(loaded: LoadedSettings, role: Role) -> float:
    """Return seconds that engines which are starting may take to finish when the process is asked to end."""
    return max((loaded.settings.workers[name].grace_period for name in role.workers), default=0.0)


async def _first(action: Awaitable[None], signal_wait: Awaitable[None]) -> bool:
    """Run `action` to its end; if the signal comes first, `action` is cancelled and waited for. Whether it ended."""
    failure: DynamoError | None = None

    async def attempt() -> None:
        nonlocal failure
        try:
            await action
        except DynamoError as error:
            failure = error

    async def signalled() -> None:
        await signal_wait

    async with TaskSet() as tasks:
        doing = tasks.spawn(attempt(), name="lifecycle")
        waiting = tasks.spawn(signalled(), name="signal")
        await asyncio.wait([doing, waiting], return_when=asyncio.FIRST_COMPLETED)
        ended = doing.done()
        if failure is not None:
            raise failure
        if ended:
            doing.result()
        return ended
