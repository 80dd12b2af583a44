"""The engine in a process of its own: ``python -m dynamo_plugin_engine_echo --help``."""

from dynamo_runtime import engine_main

from .engine import EchoEngine

if __name__ == "__main__":
    engine_main(EchoEngine)
