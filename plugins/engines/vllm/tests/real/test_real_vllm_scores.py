"""Scores of real models on a CPU: a cross-encoder of the form of BERT, and a model that makes embeddings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from dynamo_core import BackendError, EmbedRequest, ScoreRequest, WorkerConfig
from dynamo_plugin_engine_vllm.config import VllmConfig
from dynamo_plugin_engine_vllm.engine import VllmEngine
from dynamo_testing import mock_context

pytestmark = pytest.mark.full

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "where", "does", "rain", "come", "from", "clouds", "hens", "lay", "eggs")
QUERY = "where does rain come from"
DOCUMENTS = ["rain from clouds", "hens lay eggs", "rain from clouds"]


def make_cross_encoder(folder: Path) -> Path:
    """Write a BERT with random weights that rates a pair of texts."""
    torch, transformers = import_module("torch"), import_module("transformers")
    tokenizers, processors = import_module("tokenizers"), import_module("tokenizers.processors")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_input_names=["input_ids", "token_type_ids", "attention_mask"], **special
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=64,
        initializer_range=0.5,
        num_labels=1,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cross_encoder(tmp_path_factory.mktemp("cross-encoder"))


@pytest.fixture
async def scorer(cross_encoder: Path) -> AsyncIterator[VllmEngine]:
    settings = VllmConfig(runner="pooling", dtype="float32", enforce_eager=True, kv_cache_memory_bytes=2 << 20)
    engine = VllmEngine(settings, WorkerConfig(model_name="tiny", model_path=str(cross_encoder)))
    yield engine
    await engine.cleanup()


def reference(folder: Path, pairs: list[tuple[str, str]]) -> list[float]:
    """Return what the transformers library makes of the same pairs."""
    torch, transformers = import_module("torch"), import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return [float(model(**tokenizer(*pair, return_tensors="pt")).logits.sigmoid()) for pair in pairs]


async def test_cross_encoder_scores_equal_those_of_transformers(scorer: VllmEngine, cross_encoder: Path) -> None:
    config = await scorer.start(1)
    assert config.capabilities >= {"rerank", "score"}
    assert "embed" not in config.capabilities

    one = await scorer.score(ScoreRequest(queries=[QUERY], documents=DOCUMENTS), mock_context())
    queries = [QUERY, "hens", "eggs"]
    pairs = await scorer.score(ScoreRequest(queries=queries, documents=DOCUMENTS), mock_context())
    cut = await scorer.score(
        ScoreRequest(queries=[QUERY], documents=DOCUMENTS, max_tokens_per_doc=1, max_tokens_per_query=1), mock_context()
    )

    assert one.scores == pytest.approx(reference(cross_encoder, [(QUERY, text) for text in DOCUMENTS]), abs=1e-3)
    assert len(set(one.scores)) > 1
    # With the three special tokens of a pair.
    assert one.prompt_tokens == 3 * (5 + 3 + 3)
    assert pairs.scores == pytest.approx(reference(cross_encoder, [*zip(queries, DOCUMENTS, strict=True)]), abs=1e-3)
    assert cut.prompt_tokens == 3 * (1 + 1 + 3)

    with pytest.raises(BackendError.InvalidArgument):
        await scorer.score(ScoreRequest(queries=["rain"], documents=["rain " * 100]), mock_context())
    long = ScoreRequest(queries=["rain"], documents=["rain " * 100], truncate_prompt_tokens=-1)
    assert (await scorer.score(long, mock_context())).prompt_tokens <= 64
    stopped = mock_context()
    stopped.stop_generating()
    with pytest.raises(BackendError.Cancelled):
        await scorer.score(ScoreRequest(queries=["rain"], documents=["rain"]), stopped)


async def test_an_embedding_model_scores_by_cosine(make_engine: Callable[..., Any], model: Path) -> None:
    engine = make_engine(runner="pooling", args={"convert": "embed"})
    try:
        config = await engine.start(1)
        assert config.capabilities >= {"embed", "rerank", "score"}

        made = await engine.score(ScoreRequest(queries=["ba ke"], documents=["li mo", "ba ke"]), mock_context())

        tokenizer = import_module("tokenizers").Tokenizer.from_file(str(model / "tokenizer.json"))
        token_ids = [tokenizer.encode(text).ids for text in ("ba ke", "li mo")]
        query, other = (await engine.embed(EmbedRequest(token_ids=token_ids), mock_context())).embeddings
        cosine = sum(a * b for a, b in zip(query, other, strict=True))
        assert made.scores == pytest.approx([cosine, 1.0], abs=0.01)
        assert made.prompt_tokens == 2 * len(token_ids[0]) + len(token_ids[1])
    finally:
        await engine.cleanup()
