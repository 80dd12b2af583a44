"""``python -m dynamo_plugin_engine_vllm``: the engine alone, for a frontend that finds it."""

from dynamo_runtime import engine_main

from dynamo_plugin_engine_vllm.engine import VllmEngine

# vLLM starts processes that import this module again.
if __name__ == "__main__":
    engine_main(VllmEngine)
