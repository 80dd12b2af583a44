"""Addresses and logins: what is completed, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest
from dynamo_redis import RedisSettings
from dynamo_testing.settings_checks import refused_settings


@pytest.mark.parametrize(
    ("given", "full", "tls"),
    [
        ("host", "redis://host:6379", False),
        ("host:1", "redis://host:1", False),
        ("[::1]", "redis://[::1]:6379", False),
        ("rediss://host", "rediss://host:6379", True),
        ("valkey://[::1]:7", "valkey://[::1]:7", False),
        ("valkeys://store", "valkeys://store:6379", True),
    ],
)
def test_an_address_is_completed(given: str, full: str, tls: bool) -> None:
    settings = RedisSettings(url=given)

    assert settings.url == full
    assert settings.wants_tls is tls
    assert full.endswith(f":{settings.port}")
    assert settings.host in full


def test_a_certificate_turns_tls_on_with_any_scheme() -> None:
    assert RedisSettings.model_validate({"url": "redis://host", "tls": {}}).wants_tls


test_settings_that_cannot_be_meant_are_refused = refused_settings(
    RedisSettings,
    [
        ({"url": "redis://me:hunter2@host"}, "set `username` and `password`"),
        ({"url": "redis://host/3"}, "names a database: set `database`"),
        ({"url": "http://host"}, "neither redis://host:port nor rediss"),
        ({"url": "redis://host:99999"}, "a port that is none"),
        ({"url": "redis://host:port"}, "a port that is none"),
        ({"url": "redis://"}, "is not redis://host:port"),
        ({"url": "host?x=1"}, "is not redis://host:port"),
        ({"username": "me"}, "`username` needs a `password`"),
        ({"tls": {"cert": "a.pem"}}, "`cert` and `key` belong together"),
        ({"unknown": 1}, "Extra inputs"),
    ],
    secret="hunter2",
)


def test_a_password_is_hidden() -> None:
    settings = RedisSettings.model_validate({"password": "hunter2"})

    assert "hunter2" not in repr(settings) + settings.model_dump_json()


def test_redis_settings_do_not_import_the_redis_library() -> None:
    program = "import sys; from dynamo_redis import RedisSettings; RedisSettings(); print('redis' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)

    assert done.stdout.strip() == "False"
