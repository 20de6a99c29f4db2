"""Drawing tokens from logits, counter-based.

token = argmax(filtered logits / T + Gumbel(seed, sample index, position, token id)).

The noise is a pure function of what the token is, not of when it is drawn: the same seed gives the same
token whatever the batch, the chunking, the speculation or a retry. Filters come before the temperature,
in the order top_k, top_p, min_p (the order of spec 5.2's sampler chain); top_p and min_p look at the
softmax of what the filters before them left. Position is that of the token being drawn.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from skippy_stage.protocol import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1
_HEAD = 1024
"""Candidates that top_p looks at before it sorts the whole vocabulary."""

Logits = npt.NDArray[np.float32]


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele et al. 2014): a bijection that spreads every bit."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def gumbel(
    seed: int, sample_index: int, position: int, token_ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise for tokens at a position: float64, shaped like ``token_ids``.

    A pure function of its arguments; ``seed`` is any 64-bit number.
    """
    key = np.array([seed & _MASK], dtype=np.uint64)
    for word in (sample_index, position):
        key = _mix(key + _GOLDEN + np.array([word & _MASK], dtype=np.uint64) * _MIX_2)
    words = _mix(key + (token_ids.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def _nucleus(scores: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.int64]:
    """Indices of the fewest highest scores whose probability reaches ``top_p``; at least one."""
    weights = np.exp(scores - scores.max())
    needed = top_p * weights.sum()
    size = min(_HEAD, len(scores))
    while True:
        head = np.argpartition(-weights, size - 1)[:size] if size < len(scores) else np.arange(len(scores))
        order = head[np.lexsort((head, -weights[head]))]
        reached = np.cumsum(weights[order])
        if reached[-1] >= needed or size == len(scores):
            kept: npt.NDArray[np.int64] = order[: int(np.searchsorted(reached, needed)) + 1]
            return kept
        size = len(scores)


def candidates(logits: Logits, params: SamplingParams) -> npt.NDArray[np.int64]:
    """Token ids that pass the filters, ``logits`` being one row ``[vocab]``; at least one."""
    ids = np.arange(len(logits), dtype=np.int64)
    if 0 < params.top_k < len(logits):
        kth = np.partition(logits, -params.top_k)[-params.top_k]
        above = ids[logits > kth]
        level = ids[logits == kth][: params.top_k - len(above)]
        ids = np.sort(np.concatenate((above, level)))
    if params.top_p < 1.0:
        ids = ids[_nucleus(logits[ids].astype(np.float64), params.top_p)]
    if params.min_p > 0.0:
        kept = logits[ids]
        ids = ids[kept >= kept.max() + np.log(params.min_p)]
    return ids


def sample(logits: Logits, params: SamplingParams, position: int) -> int:
    """Draw the token at ``position`` from one row of logits ``[vocab]``.

    Greedy takes the lowest id among equal highest logits. Raises ValueError when a logit is NaN or +inf.
    """
    top = int(logits.argmax())
    if not np.isfinite(logits[top]):
        raise ValueError(f"logits are not finite at position {position}")
    if params.greedy:
        return top
    ids = candidates(logits, params)
    scores = logits[ids].astype(np.float64) / params.temperature
    scores += gumbel(params.seed, params.sample_index, position, ids)
    return int(ids[scores.argmax()])


def sample_rows(logits: Logits, params: SamplingParams, first_position: int) -> tuple[int, ...]:
    """Draw one token per row of ``logits`` ``[rows, vocab]``; row i draws at ``first_position + i``."""
    return tuple(sample(row, params, first_position + i) for i, row in enumerate(logits))
