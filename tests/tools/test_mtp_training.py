"""The trained head is the one that stages compute: what is trained and saved drafts the same in the engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from skippy_orchestrator.deployment import ModelSection
from skippy_stage.engines import create_engine
from skippy_stage.engines.base import Batch, DraftRows, SequenceRows
from skippy_stage.settings import StageSettings
from skippy_stage.weights import locate, open_checkpoint
from skippy_stage.weights.checkpoint import HEAD
from skippy_tools.mtp_training.corpus import ChatWriter, Corpus
from skippy_tools.mtp_training.head import TrainedHead
from skippy_tools.mtp_training.training import batches, drafts_of, measure, ngram_windows_of, train
from skippy_tools.paths import HEAD_FILE

from tests.stage.engines.tiny import LAYERS, VOCAB, make_folder

DRAFTED = np.arange(0, VOCAB, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("trained"))


def corpus_of(folder: Path, chats: int, length: int) -> Corpus:
    """Chats that count upwards by two, with hidden rows that predict it: a head can learn them."""
    random = np.random.default_rng(1)
    output = open_checkpoint(folder).tensor(HEAD)
    tokens = np.concatenate(
        [(np.arange(length) * 2 + 2 * random.integers(0, 20)) % (VOCAB - 1) for _ in range(chats)]
    )
    predicted = np.roll(tokens, -1)
    hidden = (output / np.linalg.norm(output, axis=1, keepdims=True) * 8)[predicted]
    return Corpus(
        *(tokens.astype(np.int32), predicted.astype(np.int32), hidden.astype(np.float16)),
        np.full(chats, length, np.int32),
    )


def test_what_was_trained_drafts_the_same_on_a_stage(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    head = TrainedHead(open_checkpoint(folder), DRAFTED)
    file = tmp_path / "heads" / "head.safetensors"
    head.save(file)
    engine = create_engine(
        StageSettings(
            name="last",
            model=str(folder),
            first_layer=0,
            last_layer=LAYERS,
            weights="f32",
            kv_tokens=256,
            mtp_head=str(file),
        )
    )
    text = np.random.default_rng(2).integers(0, VOCAB, 30).astype(np.int32)
    engine.open(1, 64)
    engine.forward(Batch([SequenceRows(1, 0, 29, 1)], text[:-1]))
    hidden = engine._stack.normalise(engine._seen, engine._final_norm)  # type: ignore[attr-defined]
    got: list[int] = []
    for draft in range(3):  # the engine's own drafts are what the trained head is fed with
        (drafts,) = engine.draft([DraftRows(1, 0, 0, text[1:].tolist(), draft + 1)])
        got = list(drafts)
    whole = torch.tensor([[*text.tolist(), *got]])
    padded = torch.cat([hidden, torch.zeros(4, 64)])[None]
    chats = next(batches(corpus_of(folder, 1, whole.shape[1]), head, None))
    chats = type(chats)(whole, chats.labels, padded)
    with torch.no_grad():
        rows = [states[0, 28] for states, _ in drafts_of(head, chats, 3)]
        expected = [int(head.draft_tokens[head.logits(row).argmax()]) for row in rows]
    assert got == expected
    engine.shutdown()


def test_a_head_learns_and_is_measured(folder: Path) -> None:
    torch.manual_seed(3)
    head = TrainedHead(open_checkpoint(folder), DRAFTED)
    chats = corpus_of(folder, 24, 40)
    before = measure(head, chats, 2)
    losses: list[float] = []
    steps = train(head, chats, 0.1, 2, 1, lambda done, loss: losses.append(loss))
    after = measure(head, chats, 2)
    assert steps == len(losses) > 3
    assert losses[-1] < losses[0]
    assert after.right_by_position[0] >= before.right_by_position[0]
    assert after.tokens_per_window == pytest.approx(1 + sum(after.right_by_position))


def test_a_saved_head_can_learn_more(folder: Path, tmp_path: Path) -> None:
    checkpoint, file = open_checkpoint(folder), tmp_path / "head.safetensors"
    torch.manual_seed(3)
    head = TrainedHead(checkpoint, DRAFTED)
    head.save(file)
    loaded = TrainedHead.load(file, checkpoint)
    assert loaded.draft_tokens.tolist() == DRAFTED.tolist()
    for name, value in head.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, atol=2e-3, rtol=2e-3)


def test_windows_of_ngrams() -> None:
    assert ngram_windows_of([1, 2, 3, 4] * 6, 12, 3) == (3, 12)
    assert ngram_windows_of(list(range(24)), 12, 3) == (12, 12)


def test_chats_are_what_the_model_computes() -> None:
    chats = ChatWriter(ModelSection().path, seed=1, threads=1).write(40)
    assert chats.lengths.sum() == len(chats.tokens) == len(chats.predicted) == len(chats.hidden)
    assert chats.hidden.shape[1] == 576
    learned, kept = chats.split(0.5)
    assert len(learned.tokens) + len(kept.tokens) == len(chats.tokens)


def test_the_head_in_the_repository_fits_the_default_model() -> None:
    assert HEAD_FILE.stat().st_size < 10_000_000
    model = ModelSection().path
    layers = open_checkpoint(locate(model)).config.n_layers
    engine = create_engine(
        StageSettings(
            name="last", model=model, first_layer=layers - 1, last_layer=layers, mtp_head=str(HEAD_FILE),
            kv_tokens=64,
        )
    )  # fmt: skip
    assert engine.info.mtp_layers == 1
    engine.shutdown()
