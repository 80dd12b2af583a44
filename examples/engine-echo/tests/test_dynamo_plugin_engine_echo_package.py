"""The package offers its engine."""

import dynamo_plugin_engine_echo
from dynamo_plugin_engine_echo.engine import EchoEngine


def test_the_package_offers_the_engine() -> None:
    assert dynamo_plugin_engine_echo.dynamo_register_engines() == [EchoEngine]
