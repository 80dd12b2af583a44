"""Run as a script: what vLLM says without anything around it. Arguments: a model, and a JSON list of prompts of ids."""

import json
import os
import sys
from importlib import import_module

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main(model: str, prompts: str) -> None:
    """Write the greedy answers, 24 ids each, as one JSON list."""
    vllm = import_module("vllm")
    engine = vllm.LLM(model, max_model_len=2048, enforce_eager=True, block_size=32, kv_cache_memory_bytes=2 << 20)
    params = vllm.SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)
    answers = []
    for prompt in json.loads(prompts):
        [output] = engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        answers.append(list(output.outputs[0].token_ids))
    sys.stdout.write(f"ANSWERS {json.dumps(answers)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
