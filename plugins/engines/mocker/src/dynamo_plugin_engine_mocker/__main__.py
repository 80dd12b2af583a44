"""``python -m dynamo_plugin_engine_mocker``: the mocker in a process of its own, without a config file."""

from dynamo_runtime import engine_main

from dynamo_plugin_engine_mocker.engine import MockerEngine

if __name__ == "__main__":
    engine_main(MockerEngine)
