"""The engine 'echo': what the framework finds when a config file says ``use: echo``."""

from dynamo_core import LLMEngine, hookimpl

DYNAMO_API = 1


@hookimpl
def dynamo_register_engines() -> list[type[LLMEngine]]:
    """Offer the engine. It is imported here, and not above, so that this module stays light."""
    from .engine import EchoEngine

    return [EchoEngine]
