"""Cutting a model into stages of even size."""

from __future__ import annotations

from typing import Protocol

from skippy_stage.errors import SkippyError


class LayerSizes(Protocol):
    """What the split needs to know of a checkpoint; all in bytes."""

    def layer_bytes(self) -> list[int]:
        """Bytes of each layer."""
        ...

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the token embedding, held by the first stage."""
        ...

    @property
    def head_bytes(self) -> int:
        """Bytes of the output head, held by the last stage."""
        ...


def balance_layers(checkpoint: LayerSizes, stages: int) -> list[tuple[int, int]]:
    """Cut the layers into ``stages`` contiguous ranges ``[first, last)``, the largest as small as possible.

    The first stage also holds the embedding and the last one the output head; each has at least one
    layer. Of the equally good splits it takes the one whose stages fill up from the front. Raises
    SkippyError when there are more stages than layers.
    """
    sizes = list(checkpoint.layer_bytes())
    if not 1 <= stages <= len(sizes):
        raise SkippyError(f"{stages} stages for {len(sizes)} layers: from 1 to {len(sizes)} are possible")
    sizes[0] += checkpoint.embedding_bytes
    sizes[-1] += checkpoint.head_bytes
    # The best limit is the smallest one that a greedy fill meets: found by bisection.
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if _fill(sizes, stages, middle) is None:
            low = middle + 1
        else:
            high = middle
    ranges = _fill(sizes, stages, low)
    if ranges is None:
        raise AssertionError("no split meets the limit that bisection found")
    return ranges


def _fill(sizes: list[int], stages: int, limit: int) -> list[tuple[int, int]] | None:
    """Give each stage as many layers as ``limit`` bytes allow while every later stage can have one."""
    ranges = []
    first = 0
    for stage in range(stages):
        latest_end = len(sizes) - (stages - stage - 1)
        end, total = first, 0
        while end < latest_end and total + sizes[end] <= limit:
            total += sizes[end]
            end += 1
        if end == first:
            return None
        ranges.append((first, end))
        first = end
    return ranges if first == len(sizes) else None
