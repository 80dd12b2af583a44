"""What a stack costs over the library of its engine: how the targets are asked, and what is made of it."""

import argparse
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from dynamo_testing.tiny_model import make_tokenizer_folder

from benchmarks.children import Children
from benchmarks.overhead import Stream, add_load, in_process, measure, publish, served

#: What each target was asked, in order.
Asked = list[tuple[str, int, int]]


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_load(parser, streams="2,3", prompt=20, tokens=4, rounds=2)
    return parser.parse_args(words)


def counting(name: str, asked: Asked, *, first: int = 0, less: int = 0) -> Stream:
    """Return answers with numbers from `first` on, and fewer by `less` than asked for.

    The prompts' sums go to `asked`.
    """

    async def stream(prompt: list[int], limit: int) -> AsyncIterator[Sequence[int]]:
        asked.append((name, sum(prompt), limit))
        for number in range(first, first + limit - less):
            yield [number]

    return stream


async def test_each_target_gets_the_same_prompts_and_none_twice() -> None:
    asked: Asked = []
    targets = [in_process(name, counting(name, asked)) for name in ("library", "ours")]

    results = await measure(targets, options())

    mine, other = ([(*rest,) for name, *rest in asked if name == wanted] for wanted in ("library", "ours"))
    assert sorted(mine) == sorted(other)
    assert len(set(mine)) == len(mine)
    assert {level: {name: len(taken) for name, taken in rounds.items()} for level, rounds in results.items()} == {
        2: {"library": 2, "ours": 2},
        3: {"library": 2, "ours": 2},
    }


@pytest.mark.full
async def test_a_served_model_is_measured_beside_an_in_process_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tokenizer_folder(tmp_path / "model", vocab_size=1000)
    engine = {"use": "mocker", "speedup_ratio": 0}
    async with Children(tmp_path, None) as children:
        targets = [await served(children, tmp_path, engine, model, processes=processes) for processes in (False, True)]
        chosen = options("--json", str(tmp_path / "out.json"))
        publish(await measure(targets, chosen), chosen, {"model": "mock"})

    shown = capsys.readouterr().out
    assert "the same 4 tokens from each" in shown
    assert shown.count("one process") == shown.count("1.000 (1.00–1.00)") == 2
    last = json.loads((tmp_path / "out.json").read_text())["levels"]["3"]["several processes"]
    assert {part for one in last for part in one["cpu"]} == {"frontend", "workers.m"}
