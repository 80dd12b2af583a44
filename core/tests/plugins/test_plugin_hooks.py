from __future__ import annotations

import inspect
import logging

import pytest
from dynamo_core.hookspecs import hookimpl, lifecycle, register
from dynamo_core.plugins.hooks import HookError, Hooks
from dynamo_core.plugins.loader import PluginLoader

# Parameter names are API: a plugin written against one of them breaks when it goes. Adding one is safe.
SIGNATURES = {
    "dynamo_register_engines": [],
    "dynamo_register_transports": [],
    "dynamo_register_discovery": [],
    "dynamo_register_routers": [],
    "dynamo_register_admission": [],
    "dynamo_register_frontends": [],
    "dynamo_register_response_stores": [],
    "dynamo_register_extensions": [],
    "dynamo_register_tool_parsers": [],
    "dynamo_register_reasoning_parsers": [],
    "dynamo_engine_started": ["worker", "engine_config", "worker_id"],
    "dynamo_engine_draining": ["worker", "worker_id"],
    "dynamo_engine_stopped": ["worker", "worker_id"],
    "dynamo_instance_added": ["instance", "model"],
    "dynamo_instance_removed": ["instance", "model"],
    "dynamo_request_finished": ["record"],
}


class Recorder:
    def __init__(self) -> None:
        self.seen: list[object] = []

    @hookimpl
    def dynamo_request_finished(self, record: object) -> None:
        self.seen.append(record)


class Failing:
    @hookimpl
    def dynamo_request_finished(self, record: object) -> None:
        raise RuntimeError("disk full")


def test_hook_signatures_are_unchanged() -> None:
    hooks = {
        name: list(inspect.signature(function).parameters)
        for area in (register, lifecycle)
        for name, function in vars(area).items()
        if name.startswith("dynamo_")
    }

    assert hooks == SIGNATURES
    assert Hooks().names() == sorted(SIGNATURES)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_a_failing_listener_is_logged_and_others_still_run(
    caplog: pytest.LogCaptureFixture, order: tuple[int, ...]
) -> None:
    hooks = Hooks()
    first, second = Recorder(), Recorder()
    listeners = [("first", first), ("bad-one", Failing()), ("second", second)]
    for place in order:
        hooks.add(listeners[place][1], listeners[place][0])

    with caplog.at_level(logging.ERROR):
        hooks.announce("dynamo_request_finished", record="the record")

    assert first.seen == second.seen == ["the record"]
    [entry] = caplog.records
    assert "bad-one failed in dynamo_request_finished" in entry.getMessage()
    assert "disk full" in caplog.text


def test_a_listener_gets_only_its_declared_parameters() -> None:
    class Frugal:
        seen: tuple[object, ...] = ()

        @hookimpl
        def dynamo_engine_draining(self, worker_id: int, worker: str = "unset") -> None:
            self.seen = (worker_id, worker)

    hooks, listener = Hooks(), Frugal()
    hooks.add(listener, "frugal")

    hooks.announce("dynamo_engine_draining", worker="mock", worker_id=3)

    assert listener.seen == (3, "mock")


def test_announcing_without_listeners_does_nothing() -> None:
    Hooks().announce("dynamo_request_finished", record=None)


def test_announcing_an_unknown_hook_raises() -> None:
    with pytest.raises(ValueError, match="no hook 'dynamo_request_ended'"):
        Hooks().announce("dynamo_request_ended", record=None)


def test_announcing_without_a_parameter_raises() -> None:
    with pytest.raises(ValueError, match="dynamo_engine_draining needs worker_id"):
        Hooks().announce("dynamo_engine_draining", worker=None)


def test_a_refused_listener_is_not_called() -> None:
    class Misspelled(Recorder):
        @hookimpl
        def dynamo_request_finnished(self, record: object) -> None: ...

    hooks, listener = Hooks(), Misspelled()

    with pytest.raises(HookError, match="did you mean dynamo_request_finished"):
        hooks.add(listener, "misspelled")
    hooks.announce("dynamo_request_finished", record=1)

    assert listener.seen == []


def test_a_built_in_listener_is_called_like_any_other() -> None:
    loader, listener = PluginLoader(), Recorder()

    loader.register_builtin(listener, "access-log")
    loader.hooks.announce("dynamo_request_finished", record=1)

    assert listener.seen == [1]
