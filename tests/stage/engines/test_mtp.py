"""The MTP head: its drafts are those of the published architecture, however its rows reach it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from skippy_stage.engines.base import Batch, DraftRows, SequenceRows, StageEngine
from skippy_stage.errors import SkippyError, UnsupportedModel

from tests.stage.engines.tiny import LAYERS, VOCAB, random_tokens
from tests.stage.engines.tiny_mimo import PREFIX, TinyMimo, make_mimo
from tests.stage.engines.variants import BLOCK, Variant

MakeEngine = Callable[..., StageEngine]
CLOSE = 5e-2


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> TinyMimo:
    return make_mimo(tmp_path_factory.mktemp("mimo"))


@pytest.fixture
def make_engine(variant: Variant, mimo: TinyMimo) -> Iterator[MakeEngine]:
    made: list[StageEngine] = []

    def make(folder: Path | None = None, first: int = 0, **settings: object) -> StageEngine:
        made.append(variant.make(folder or mimo.folder, first, LAYERS, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.shutdown()


def text_of(count: int, seed: int = 0) -> list[int]:
    tokens: list[int] = random_tokens(count, seed).tolist()
    return tokens


def see(engine: StageEngine, text: Sequence[int], *sizes: int, sequence: int = 0) -> None:
    """Run all tokens of a text but the last in chunks of such sizes, and show them to the head."""
    past = 0
    for size in sizes:
        rows = SequenceRows(sequence, past, size, 1)
        engine.forward(Batch([rows], np.array(text[past : past + size], np.int32)))
        engine.draft([DraftRows(sequence, past, 0, text[past + 1 : past + size + 1])])
        past += size


def exact(variant: Variant) -> bool:
    return variant.settings["weights"] == "f32"


def assert_drafts(mimo: TinyMimo, variant: Variant, text: Sequence[int], got: Sequence[int]) -> None:
    """Exactly the reference's in f32; elsewhere rounding may part them, but not at once for most texts."""
    expected = mimo.drafts(text, len(got))
    if exact(variant):
        assert list(got) == expected
    assert len(got) == len(expected)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("cuts", [(11,), (4, 7), (1,) * 11, (8, 2, 1)])
def test_drafts_are_the_published_heads(
    mimo: TinyMimo, variant: Variant, make_engine: MakeEngine, cuts: tuple[int, ...], count: int
) -> None:
    engine = make_engine()
    assert engine.info.mtp_layers == 1
    text = text_of(12)
    engine.open(0, 64)
    *first, last = cuts
    see(engine, text, *first)
    past = sum(first)
    engine.forward(Batch([SequenceRows(0, past, last, 1)], np.array(text[past:-1], np.int32)))
    before = engine.usage()
    (drafts,) = engine.draft([DraftRows(0, past, 0, text[past + 1 :], count)])
    assert len(drafts) == count
    assert_drafts(mimo, variant, text, drafts)
    assert engine.usage() == before
    engine.check_integrity()


def test_sequences_that_share_a_batch_draft_what_they_draft_alone(
    mimo: TinyMimo, variant: Variant, make_engine: MakeEngine
) -> None:
    engine = make_engine()
    texts = {name: text_of(length, name) for name, length in ((1, 9), (2, 4), (3, 14))}
    for name in texts:
        engine.open(name, 40)
    rows = [SequenceRows(name, 0, len(text) - 1, 1) for name, text in texts.items()]
    tokens = np.concatenate([text[:-1] for text in texts.values()]).astype(np.int32)
    engine.forward(Batch(rows, tokens))
    starts = dict(zip(texts, np.cumsum([0] + [item.rows for item in rows]).tolist(), strict=False))
    wanted = {1: 3, 2: 0, 3: 1}
    drafts = engine.draft(
        [DraftRows(name, 0, starts[name], text[1:], wanted[name]) for name, text in texts.items()]
    )
    assert [len(tokens) for tokens in drafts] == [3, 0, 1]
    for name, got in zip(texts, drafts, strict=True):
        if got:
            assert_drafts(mimo, variant, texts[name], got)


def test_a_window_of_which_some_rows_were_wrong(
    mimo: TinyMimo, variant: Variant, make_engine: MakeEngine
) -> None:
    """Only right rows are seen; those behind are overwritten by what comes at their positions later."""
    engine = make_engine()
    text = text_of(14, 3)
    engine.open(0, 64)
    see(engine, text, 6)
    window = [*text[6:8], 5, 6, 7]
    engine.forward(Batch([SequenceRows(0, 6, 5, 5)], np.array(window, np.int32)))
    (drafts,) = engine.draft([DraftRows(0, 6, 0, text[7:9], 2)])
    assert_drafts(mimo, variant, text[:9], drafts)
    assert engine.cached(0) == 11
    engine.forward(Batch([SequenceRows(0, 8, 5, 1)], np.array(text[8:13], np.int32)))
    (drafts,) = engine.draft([DraftRows(0, 8, 0, text[9:], 4)])
    assert_drafts(mimo, variant, text, drafts)


def test_drafts_do_not_change_what_the_model_computes(variant: Variant, make_engine: MakeEngine) -> None:
    engine = make_engine()
    text = text_of(20, 4)
    engine.open(0, 64)
    engine.open(1, 64)
    see(engine, text, 19)
    engine.forward(Batch([SequenceRows(1, 0, 19, 1)], np.array(text[:19], np.int32)))
    outputs = [
        engine.forward(Batch([SequenceRows(name, 19, 1, 1)], np.array(text[19:], np.int32))).logits
        for name in (0, 1)
    ]
    assert outputs[0] is not None
    assert outputs[1] is not None
    np.testing.assert_array_equal(outputs[0], outputs[1])


def test_drafts_end_where_the_sequence_has_no_room(variant: Variant, make_engine: MakeEngine) -> None:
    engine = make_engine()
    text = text_of(9)
    engine.open(0, 10)
    engine.forward(Batch([SequenceRows(0, 0, 8, 1)], np.array(text[:8], np.int32)))
    (drafts,) = engine.draft([DraftRows(0, 0, 0, text[1:], 9)])
    assert len(drafts) == 3


def test_a_shared_prefix_keeps_its_head(mimo: TinyMimo, variant: Variant, make_engine: MakeEngine) -> None:
    """A sequence that starts with another one's blocks drafts as if it had computed them."""
    engine = make_engine()
    store = engine.prefix_blocks
    assert store is not None
    text = text_of(3 * BLOCK + 1, 6)
    engine.open(0, 40)
    see(engine, text, 3 * BLOCK)
    blocks = store.hold(0, 0, 2)
    engine.close(0)
    engine.open(1, 40)
    store.adopt(1, blocks, 2 * BLOCK)
    engine.forward(Batch([SequenceRows(1, 2 * BLOCK, BLOCK, 1)], np.array(text[2 * BLOCK : -1], np.int32)))
    (drafts,) = engine.draft([DraftRows(1, 2 * BLOCK, 0, text[2 * BLOCK + 1 :], 3)])
    assert_drafts(mimo, variant, text, drafts)
    for block in blocks:
        store.drop(block)
    engine.check_integrity()


def test_an_exact_state_keeps_its_head(mimo: TinyMimo, variant: Variant, make_engine: MakeEngine) -> None:
    engine = make_engine()
    states = engine.exact_state
    assert states is not None
    text = text_of(13, 7)
    engine.open(0, 40)
    see(engine, text, 11)
    state = states.export(0)
    engine.open(1, 40)
    states.load(1, state, 11)
    engine.forward(Batch([SequenceRows(1, 11, 1, 1)], np.array(text[11:12], np.int32)))
    (drafts,) = engine.draft([DraftRows(1, 11, 0, text[12:], 3)])
    assert_drafts(mimo, variant, text, drafts)


@pytest.fixture(scope="module")
def head_file(mimo: TinyMimo, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model without its head, and the head in a file of its own, with a vocabulary of its own."""
    folder = tmp_path_factory.mktemp("apart")
    tensors = load_file(mimo.folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if not n.startswith(PREFIX)}, folder / "model.safetensors")
    config = json.loads((mimo.folder / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))
    head = {n: t for n, t in tensors.items() if n.startswith(PREFIX)}
    file = folder / "head.st"
    save_file(head | {f"{PREFIX}draft_token_ids": torch.arange(0, VOCAB, 3)}, file)
    return folder, file


def test_a_head_in_a_file_with_a_vocabulary_of_its_own(
    mimo: TinyMimo, variant: Variant, make_engine: MakeEngine, head_file: tuple[Path, Path]
) -> None:
    folder, file = head_file
    engine = make_engine(folder, mtp_head=str(file))
    assert engine.info.mtp_layers == 1
    text = text_of(9, 8)
    engine.open(0, 40)
    engine.forward(Batch([SequenceRows(0, 0, 8, 1)], np.array(text[:8], np.int32)))
    (drafts,) = engine.draft([DraftRows(0, 0, 0, text[1:], 4)])
    allowed = range(0, VOCAB, 3)
    assert set(drafts) <= set(allowed)
    if exact(variant):
        assert list(drafts) == mimo.drafts(text, 4, allowed)


def test_a_model_without_a_head(make_engine: MakeEngine, head_file: tuple[Path, Path]) -> None:
    engine = make_engine(head_file[0])
    assert engine.info.mtp_layers == 0
    with pytest.raises(SkippyError, match="no MTP head"):
        engine.draft([])


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (lambda t: t.pop(f"{PREFIX}input_proj.weight"), "'.*input_proj.weight' is missing"),
        (lambda t: t.update({f"{PREFIX}input_proj.weight": torch.zeros(2, 2)}), r"has shape \[2, 2\]"),
        (lambda t: t.update({f"{PREFIX}fc.weight": torch.zeros(2)}), "'.*fc.weight' is not computed"),
        (lambda t: t.update({f"{PREFIX}draft_token_ids": torch.tensor([3, 97])}), "from 0 to 96"),
        (lambda t: t.update({f"{PREFIX}draft_token_ids": torch.tensor([3, 3])}), "ascending"),
        (lambda t: t.update({f"{PREFIX}draft_token_ids": torch.zeros(2)}), "has type F32"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(
    change: Callable[[dict[str, torch.Tensor]], object],
    refused: str,
    make_engine: MakeEngine,
    head_file: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    folder, file = head_file
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, tmp_path / "head.safetensors")
    with pytest.raises((SkippyError, UnsupportedModel), match=refused):
        make_engine(folder, mtp_head=str(tmp_path / "head.safetensors"))
