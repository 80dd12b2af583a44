"""The deadlines and health checks of workers, as files and the environment set them."""

from __future__ import annotations

import logging

import pytest
from dynamo_core.errors import ConfigError
from dynamo_runtime.settings import load_settings
from dynamo_runtime.settings.model import WorkerSettings

GRACE = "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS"


def worker(*sets: str, **env: str) -> WorkerSettings:
    return load_settings(env=env, sets=sets).settings.workers["mock"]


@pytest.mark.parametrize(
    ("text", "seconds", "told"),
    [("2.5", 2.5, False), ("0", 0, False), ("-3", 0, False), ("", 5, False), ("soon", 5, True), ("nan", 5, True)],
)
def test_the_grace_period_of_the_environment_is_forgiving(
    text: str, seconds: float, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = worker(**{GRACE: text}).grace_period

    assert found == seconds
    assert (GRACE in caplog.text) is told


def test_a_grace_period_that_is_written_into_a_file_is_not() -> None:
    with pytest.raises(ConfigError, match=r"grace_period.*at least 0"):
        worker("workers.mock.grace_period=-3")


def test_the_deadline_of_the_environment_leaves_time_to_clean_up() -> None:
    assert (worker().shutdown_timeout, worker().request_drain) == (30, 25)
    short = worker(DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT="8")
    assert (short.shutdown_timeout, short.request_drain) == (8, 4)
    assert worker("workers.mock.drain_timeout=29").request_drain == 29


def test_a_drain_that_leaves_no_time_to_clean_up_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"workers\.mock.*drain_timeout.*less than shutdown_timeout"):
        worker("workers.mock.drain_timeout=30")


def test_health_checks_have_short_names_in_the_environment() -> None:
    check = worker(
        DYN_HEALTH_CHECK_ENABLED="true",
        DYN_CANARY_WAIT_TIME="4.5",
        DYN_HEALTH_CHECK_REQUEST_TIMEOUT="2",
        DYN_HEALTH_CHECK_PAYLOAD="@/run/probe.json",
    ).health_check

    assert (check.enabled, check.wait, check.timeout, check.payload) == (True, 4.5, 2, "@/run/probe.json")
    assert check.unregister
    assert not worker().health_check.enabled


@pytest.mark.parametrize("text", ['{"token_ids": [1, 2], "stop_conditions": {"max_tokens": 1}}', "{token_ids: [1, 2]}"])
def test_a_payload_may_be_written_as_a_mapping_or_as_json(text: str) -> None:
    by_name = worker(DYN_HEALTH_CHECK_PAYLOAD=text).health_check.payload
    by_key = worker(f"workers.mock.health_check.payload={text}").health_check.payload

    assert by_name == by_key
    assert isinstance(by_name, dict)
    assert by_name["token_ids"] == [1, 2]


def test_a_non_object_payload_is_left_to_the_worker() -> None:
    assert worker(DYN_HEALTH_CHECK_PAYLOAD="[1]").health_check.payload == "[1]"
