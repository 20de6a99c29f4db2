"""Distilling the model's own predictions into a head, several drafts deep, and measuring what it drafts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from skippy_orchestrator.deployment.speculation import NgramSection
from skippy_orchestrator.speculation.proposers import make_proposer
from torch.nn import functional

from skippy_tools.mtp_training.corpus import Corpus
from skippy_tools.mtp_training.head import TrainedHead

BATCH_ROWS: Final = 2048
PEAK_RATE: Final = 1e-3
WEIGHTS: Final = (1.0, 0.7, 0.5)
"""Of the first, second and third draft in the loss."""
ROW_WEIGHT: Final = 1.0
"""Of the distance between rows, in the loss of a draft."""
_UNKNOWN: Final = -100
_LEAST_ANSWER: Final = 16
"""Tokens; shorter greedy endings are chance."""


@dataclass(frozen=True)
class Chats:
    """Some chats side by side, padded."""

    tokens: torch.Tensor
    labels: torch.Tensor
    """The model's predictions as places in the draft vocabulary; ``_UNKNOWN`` elsewhere."""
    hidden: torch.Tensor


def batches(corpus: Corpus, head: TrainedHead, order: np.random.Generator | None) -> Iterator[Chats]:
    """The corpus in batches of chats of about the same length; shuffled when ``order`` is given."""
    place = torch.full((int(head.draft_tokens.max()) + 1,), _UNKNOWN)
    place[head.draft_tokens] = torch.arange(len(head.draft_tokens))
    ends = np.cumsum(corpus.lengths)
    by_length = np.argsort(corpus.lengths, kind="stable")
    groups, group = [], [int(by_length[0])]
    for chat in by_length[1:]:
        if (len(group) + 1) * corpus.lengths[chat] > BATCH_ROWS:
            groups.append(group)
            group = []
        group.append(int(chat))
    groups.append(group)
    for index in order.permutation(len(groups)) if order is not None else range(len(groups)):
        chosen = groups[index]
        longest = int(max(corpus.lengths[chat] for chat in chosen))
        tokens = torch.zeros(len(chosen), longest, dtype=torch.long)
        labels = torch.full((len(chosen), longest), _UNKNOWN)
        hidden = torch.zeros(len(chosen), longest, corpus.hidden.shape[1])
        for i, chat in enumerate(chosen):
            rows = slice(int(ends[chat] - corpus.lengths[chat]), int(ends[chat]))
            count = rows.stop - rows.start
            tokens[i, :count] = torch.from_numpy(corpus.tokens[rows].astype(np.int64))
            predicted = torch.from_numpy(corpus.predicted[rows].astype(np.int64))
            known = predicted.clamp(max=len(place) - 1)
            labels[i, :count] = torch.where(predicted < len(place), place[known], _UNKNOWN)
            hidden[i, :count] = torch.from_numpy(corpus.hidden[rows].astype(np.float32))
        yield Chats(tokens, labels, hidden)


def drafts_of(head: TrainedHead, chats: Chats, depth: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each draft its rows behind the final norm and what they should predict."""
    hidden = chats.hidden[:, :-1]
    earlier: list[tuple[torch.Tensor, torch.Tensor]] = []
    for draft in range(depth):
        x = head.joined(hidden, chats.tokens[:, 1 + draft :])
        rows, own = head.layer(x, draft, earlier)
        earlier.append(own)
        yield rows, chats.labels[:, 1 + draft :]
        hidden = rows[:, :-1]


def distillation_loss(head: TrainedHead, rows: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
    """How far the head's rows are from the model's own rows there, and what they predict from what those predict.

    Both ``[rows, hidden]`` behind their final norms. The whole distribution says more than its best token, and rows
    that are alike say where it comes from (EAGLE, arXiv 2401.15077, section 3.2).
    """
    with torch.no_grad():
        wanted = head.logits(goal).softmax(-1)
    guessed = functional.cross_entropy(head.logits(rows), wanted)
    return guessed + ROW_WEIGHT * functional.smooth_l1_loss(rows, goal)


def train(
    head: TrainedHead,
    corpus: Corpus,
    minutes: float,
    depth: int,
    seed: int,
    progress: Callable[[float, float], None],
) -> int:
    """Train for so many minutes; gives the steps done. ``progress`` is told the share done, and the loss."""
    order = np.random.default_rng(seed)
    optimiser = torch.optim.AdamW(head.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    started, steps = time.monotonic(), 0
    while True:
        for chats in batches(corpus, head, order):
            done = (time.monotonic() - started) / (60 * minutes)
            if done >= 1:
                return steps
            warm = min(1.0, (steps + 1) / 30)
            for group in optimiser.param_groups:
                group["lr"] = PEAK_RATE * warm * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * done)))
            total = torch.zeros(())
            for draft, (rows, labels) in enumerate(drafts_of(head, chats, depth)):
                known = labels != _UNKNOWN
                goal = chats.hidden[:, 1 + draft :][known]
                total = total + WEIGHTS[draft] * distillation_loss(head, rows[known], goal)
            optimiser.zero_grad()
            torch.autograd.backward(total)
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimiser.step()
            steps += 1
            progress(min(done, 1.0), float(total.detach()))


@dataclass(frozen=True)
class Measured:
    """What drafting gives on chats that were not trained on, were every window as long as ``drafts``."""

    drafts: int
    right_by_position: tuple[float, ...]
    """Share of rows whose drafts are right up to and with this one."""
    tokens_per_window: float
    """1 and the mean of the drafts that are right."""
    ngram_tokens_per_window: float
    """The same of n-gram drafts over the same text, where it is the model's own greedy text."""


@torch.no_grad()
def measure(head: TrainedHead, corpus: Corpus, drafts: int) -> Measured:
    """How many drafts in a row agree with the model, in the greedy answers of the corpus and nowhere else."""
    right = torch.zeros(drafts)
    rows = ngram_windows = ngram_tokens = 0
    ends = np.cumsum(corpus.lengths)
    for end, length in zip(ends, corpus.lengths, strict=True):
        span = slice(int(end - length), int(end))
        answer = greedy_tail(corpus, span)
        if answer < _LEAST_ANSWER:
            continue
        one = Corpus(
            *(corpus.tokens[span], corpus.predicted[span]), corpus.hidden[span], np.array([length], np.int32)
        )
        kept: torch.Tensor | None = None
        for i, (states, labels) in enumerate(drafts_of(head, next(batches(one, head, None)), drafts)):
            agrees = (head.logits(states).argmax(-1) == labels)[0]
            kept = agrees if kept is None else kept[: len(agrees)] & agrees
            right[i] += kept[-answer:].sum()
        rows += answer
        windows, tokens = ngram_windows_of(corpus.tokens[span].tolist(), answer, drafts)
        ngram_windows, ngram_tokens = ngram_windows + windows, ngram_tokens + tokens
    if not rows:
        raise ValueError("no answer among the chats kept apart is greedy: write more chats")
    share = (right / rows).tolist()
    return Measured(drafts, tuple(share), 1 + sum(share), ngram_tokens / max(ngram_windows, 1))


def greedy_tail(corpus: Corpus, span: slice) -> int:
    """How many of a chat's last tokens are what the model expected most: a greedy answer, from where it begins."""
    agrees = corpus.tokens[span][1:] == corpus.predicted[span][:-1]
    return len(agrees) if agrees.all() else int(np.argmin(agrees[::-1]))


def ngram_windows_of(text: list[int], answer: int, drafts: int) -> tuple[int, int]:
    """Windows and tokens that suffix n-grams take for a text's last ``answer`` tokens."""
    section = NgramSection(kind="suffix", min_ngram=3, max_ngram=32, max_proposal_tokens=32)
    windows, at = 0, len(text) - answer
    while at < len(text):
        proposer = make_proposer(section)
        proposer.follow(text[:at])
        proposed = proposer.propose((), drafts)
        right = 0
        while right < len(proposed) and at + right < len(text) and proposed[right] == text[at + right]:
            right += 1
        windows, at = windows + 1, at + 1 + right
    return windows, answer
