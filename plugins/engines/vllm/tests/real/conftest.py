"""Tests over the real vLLM, on a CPU: `make test-vllm`. Where vLLM is not installed there are none.

The model is made here: random weights of a few hundred kB, and a tokenizer.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from dynamo_core import DisaggregationMode, LLMEngineOutput, PreprocessedRequest, WorkerConfig
from dynamo_plugin_engine_vllm.config import VllmConfig
from dynamo_plugin_engine_vllm.engine import VllmEngine
from dynamo_testing import mock_context
from dynamo_testing.tiny_model import make_tokenizer_folder

collect_ignore_glob = [] if importlib.util.find_spec("vllm") is not None else ["test_*.py"]

#: For vLLM in this process and in those that the tests start.
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Without it the first request for log-probabilities compiles something for seconds.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "UCX_TLS": "tcp,self,sm",
}
os.environ.update(QUIET)

#: The smallest that vLLM takes on a CPU.
BLOCK = 32
SMALL: dict[str, Any] = {
    "max_model_len": 2048,
    "enforce_eager": True,
    "block_size": BLOCK,
    "kv_cache_memory_bytes": 2 << 20,
    "max_num_seqs": 16,
    # Long enough for all of vLLM to be taken apart; its processes may need longer to vanish.
    "shutdown_timeout": 5,
    # A model that knows nothing would write blanks until the end.
    "args": {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}},
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Allow for the many warnings and the slow start of vLLM."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.timeout(300))


def make_model(folder: Path, *, vocab_size: int = 1024, hidden: int = 64, layers: int = 2, heads: int = 2) -> Path:
    """Write a Llama with random weights that transformers and vLLM load."""
    torch, safetensors = import_module("torch"), import_module("safetensors.torch")
    make_tokenizer_folder(folder, vocab_size=vocab_size)
    tokenizer = folder / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    made = json.loads((folder / "config.json").read_text())
    vocabulary, inner, head = made["vocab_size"], 2 * hidden, hidden // heads
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": head,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": made["bos_token_id"],
        "eos_token_id": made["eos_token_id"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, spread: float = 0.1) -> Any:
        return (torch.randn(rows, columns, generator=random) * spread).to(torch.bfloat16)

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    weights = {
        "model.embed_tokens.weight": matrix(vocabulary, hidden, 0.5),
        "model.norm.weight": ones.clone(),
        "lm_head.weight": matrix(vocabulary, hidden, 0.3),
    }
    shapes = {
        "self_attn.q_proj": (heads * head, hidden),
        "self_attn.k_proj": (head, hidden),
        "self_attn.v_proj": (head, hidden),
        "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(layers):
        begin = f"model.layers.{layer}."
        weights |= {f"{begin}{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        weights |= {f"{begin}{name}.weight": ones.clone() for name in ("input_layernorm", "post_attention_layernorm")}
    safetensors.save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def make_engine(model: Path) -> Callable[..., VllmEngine]:
    def make(mode: DisaggregationMode = DisaggregationMode.AGGREGATED, **settings: Any) -> VllmEngine:
        worker = WorkerConfig(model_name="tiny", model_path=str(model), disaggregation_mode=mode)
        return VllmEngine(VllmConfig(**SMALL | settings), worker)

    return make


@pytest.fixture(scope="session")
def ask() -> Callable[..., Any]:
    """Ask an engine and give all items of the answer."""

    async def ask(engine: VllmEngine, request: PreprocessedRequest) -> list[LLMEngineOutput]:
        return [item async for item in engine.generate(request, mock_context())]

    return ask
