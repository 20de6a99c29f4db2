"""A checkpoint with an MTP head of its own (MiMo), tiny and random, on a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from skippy_client import Generation, SkippyClient
from skippy_tools.server import ServerProcess
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.stage.engines.tiny_mimo import TinyMimo, make_mimo
from tests.triton.support import assert_idle, client_of, generate_all
from tests.triton_server import deployment, running

pytestmark = pytest.mark.triton

PROMPT = "The lighthouse, and the sea; the lighthouse, and"
TOKENS = 24


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> TinyMimo:
    mimo = make_mimo(tmp_path_factory.mktemp("mimo"))
    alphabet = [
        *map(chr, range(33, 127)),
        "\u0120",
        "\u010a",
        "\u010b",
    ]  # visible ASCII, and three of white space
    assert len(alphabet) == mimo.model.config.vocab_size
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(mimo.folder / "tokenizer.json"))
    return mimo


@pytest.fixture(scope="module")
def server(mimo: TinyMimo) -> Iterator[ServerProcess]:
    toml = f"""
[model]
path = "{mimo.folder}"
context_tokens = 256
[pipeline]
stages = 2
weights = "f32"
[kv]
tokens = 4096
"""
    with running(deployment(toml)) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[SkippyClient]:
    with client_of(server) as client:
        yield client
        assert assert_idle(client).raw["stages"][-1]["head"]["failures"] == 0


def reference(mimo: TinyMimo, ids: list[int], count: int) -> list[int]:
    """Greedy, the whole text anew for every token."""
    text = list(ids)
    with torch.no_grad():
        for _ in range(count):
            text.append(int(mimo.model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(ids) :]


def test_text_is_that_of_transformers_and_drafts_are_the_heads(mimo: TinyMimo, client: SkippyClient) -> None:
    ids = [ord(letter) - 33 if letter != " " else 94 for letter in PROMPT]
    expected = reference(mimo, ids, TOKENS)
    options = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True}
    (plain,) = generate_all(client, [{**options, "speculation": "off"}])
    assert isinstance(plain, Generation)
    assert list(plain.token_ids) == expected
    drafted = client.generate(**options, speculation="mtp,window=1")  # type: ignore[arg-type]
    assert list(drafted.token_ids) == expected
    # The reference head at every place where the server asked its own: behind each token that it did not draft.
    right = asked = 0
    at = 1
    while at < TOKENS - 1:
        asked += 1
        hit = mimo.drafts([*ids, *expected[: at + 1]], 1) == expected[at + 1 : at + 2]
        right += hit
        at += 1 + hit
    assert drafted.total_draft_tokens > 0
    assert abs(drafted.total_accepted_draft_tokens - right) <= 1
    assert abs(drafted.total_draft_tokens - asked) <= 1


def test_all_ways_at_once(client: SkippyClient) -> None:
    wishes = ("off", "mtp", "composite", "composite,depth=1", "ngram", "mtp,window=1")
    requests = [
        {"prompt": PROMPT[i % 3 :], "max_tokens": TOKENS, "ignore_eos": True, "speculation": wish}
        for wish in wishes
        for i in range(3)
    ]
    results = generate_all(client, requests)
    texts: dict[int, set[tuple[int, ...]]] = {}
    for i, result in enumerate(results):
        assert isinstance(result, Generation)
        texts.setdefault(i % 3, set()).add(tuple(result.token_ids))
    assert [len(each) for each in texts.values()] == [1, 1, 1]
