from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from skippy_orchestrator.text.tokenizer import TextModel, check_tokenizers
from skippy_orchestrator.text.vocabulary import read_vocabulary
from skippy_stage.errors import InvalidArgument, SkippyError, UnsupportedModel
from skippy_stage.weights import locate
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from tests.orchestrator.conftest import SMOLLM2

TEXTS = [
    "Hello, world!",
    "In 1984, 12345 people   met.\n\n\tThey\u00a0said: \u201cnaïve café\u201d",
    "def f(x):\n    return {'a': [x**2 for x in range(10)]}\n",
    "中文字符和日本語、한국어",
    "emoji 🙂👩‍👩‍👧 ok",
    "<|im_start|>user\nhi<|im_end|>\n",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_a_round_trip(smollm2: TextModel, text: str) -> None:
    tokens = smollm2.encode(text)
    plain = text.replace("<|im_start|>", "").replace("<|im_end|>", "")
    assert smollm2.decode(tokens) == plain


@given(text=st.text(max_size=30))
def test_any_text_survives_a_round_trip(smollm2: TextModel, text: str) -> None:
    clean = text.encode("utf-8", "replace").decode()
    # The vocabulary lacks a few bytes, of characters that nobody has assigned.
    assume(all(bytes([byte]) in set(smollm2.token_bytes) for byte in clean.encode()))
    assert smollm2.decode(smollm2.encode(clean)) == clean


def test_decoding_agrees_with_the_library(smollm2: TextModel) -> None:
    library = read_vocabulary(locate(SMOLLM2)).tokenizer
    for text in TEXTS:
        tokens = smollm2.encode(text)
        for cut in range(len(tokens) + 1):
            assert smollm2.decode(tokens[:cut]) == library.decode(tokens[:cut], skip_special_tokens=True)


def test_smollm2_cuts_numbers_into_digits(smollm2: TextModel) -> None:
    assert [smollm2.decode([t]) for t in smollm2.encode("x 1984")] == ["x", " ", "1", "9", "8", "4"]


def test_smollm2_ends_and_sizes(smollm2: TextModel) -> None:
    assert smollm2.end_tokens == {2}
    assert smollm2.vocab_size == 49152
    assert smollm2.encode("") == []


def test_chat_follows_the_models_template(smollm2: TextModel) -> None:
    tokens = smollm2.encode_chat(
        '[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]'
    )
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokens == smollm2.encode(expected)


def test_what_the_next_turn_of_a_chat_begins_with(smollm2: TextModel) -> None:
    first = '[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]'
    tokens = smollm2.encode_chat(first)
    shared = smollm2.chat_prefix(first, tokens)
    assert tokens[shared:] == smollm2.encode("<|im_start|>assistant\n")
    turn = first[:-1] + ', {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"}]'
    assert smollm2.encode_chat(turn)[:shared] == tokens[:shared]
    assert smollm2.chat_prefix(first, [5, *tokens]) == 0, "not a beginning of these tokens"


@pytest.mark.parametrize(
    "messages",
    [
        "",
        "hello",
        "{}",
        "[]",
        "[1]",
        '[{"role": "user"}]',
        '[{"role": "user", "content": 3}]',
        '[{"role": "user", "content": "hi", "tool_calls": []}]',
        '[{"role": "user", "content": "hi"}',
        "[" * 100_000,
    ],
)
def test_messages_that_are_no_conversation_are_refused(smollm2: TextModel, messages: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^messages: got .*, expected ") as refusal:
        smollm2.encode_chat(messages)
    assert len(str(refusal.value)) < 400


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer as a Hugging Face folder has it."""
    vocabulary = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "Ġ": 4, "<|eot|>": 5}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|eot|>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "tokenizer_config.json", {"bos_token": {"content": "<s>"}, "eos_token": "</s>"})
    return tmp_path


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def test_folder_bos_comes_from_the_tokenizer_and_nothing_is_cut(folder: Path) -> None:
    text = TextModel.load(folder)
    assert text.encode("ab ab") == [0, 2, 3, 4, 2, 3]
    assert text.encode("") == [0]
    assert text.end_tokens == {1}


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"config.json": {"eos_token_id": 5}}, {5}),
        ({"config.json": {"eos_token_id": 1}, "generation_config.json": {"eos_token_id": [1, 5]}}, {1, 5}),
        ({"config.json": {"eos_token_id": None}}, {1}),
    ],
)
def test_folder_end_tokens(folder: Path, files: dict[str, dict[str, Any]], ends: set[int]) -> None:
    for name, content in files.items():
        write(folder / name, content)
    assert TextModel.load(folder).end_tokens == ends


def test_folder_templates(folder: Path) -> None:
    messages = '[{"role": "user", "content": "ab"}]'
    with pytest.raises(InvalidArgument, match="no chat template"):
        TextModel.load(folder).encode_chat(messages)
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    write(folder / "tokenizer_config.json", {**config, "chat_template": template})
    assert TextModel.load(folder).encode_chat(messages) == [0, 2, 3, 1]
    named = [{"name": "tools", "template": "b"}, {"name": "default", "template": template}]
    write(folder / "tokenizer_config.json", {**config, "chat_template": named})
    assert TextModel.load(folder).encode_chat(messages) == [0, 2, 3, 1]
    (folder / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidArgument, match="roles must alternate"):
        TextModel.load(folder).encode_chat(messages)


@pytest.mark.parametrize(
    "template", ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}"]
)
def test_templates_run_in_a_sandbox(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(InvalidArgument, match=r"^messages"):
        TextModel.load(folder).encode_chat('[{"role": "user", "content": "ab"}]')


def test_broken_files_are_named(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(SkippyError, match="chat template"):
        TextModel.load(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(SkippyError, match=r"tokenizer_config\.json"):
        TextModel.load(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(SkippyError, match=r"tokenizer\.json"):
        TextModel.load(folder)
    shutil.rmtree(folder)
    with pytest.raises(SkippyError):
        TextModel.load(folder)


def gguf_file(path: Path, model: str = "gpt2", pre: str = "gpt-2", add_bos: bool = False) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, "12", "34", "1234"]
    writer.add_token_list([*words, "<s>", "</s>", "<|eot|>"])
    writer.add_token_types([1] * len(words) + [3, 3, 3])
    writer.add_token_merges(["1 2", "3 4", "12 34"])
    writer.add_bos_token_id(len(words))
    writer.add_eos_token_id(len(words) + 1)
    writer.add_eot_token_id(len(words) + 2)
    writer.add_add_bos_token(add_bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_gguf_bos_and_ends(tmp_path: Path) -> None:
    plain = TextModel.load(gguf_file(tmp_path / "a.gguf"))
    assert plain.encode("") == []
    assert plain.end_tokens == {260, 261}
    with_bos = TextModel.load(gguf_file(tmp_path / "b.gguf", add_bos=True))
    assert with_bos.encode("") == [259]
    assert with_bos.encode("hi")[0] == 259
    assert with_bos.decode(with_bos.encode("hi")) == "hi"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["a", "1234"]),
        ("smollm", ["a", "1", "2", "3", "4"]),
        ("qwen2", ["a", "1", "2", "3", "4"]),
        ("llama-bpe", ["a", "12", "3", "4"]),
    ],
)
def test_gguf_numbers_are_cut_as_the_model_was_trained(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    text = TextModel.load(gguf_file(tmp_path / "a.gguf", pre=pre))
    assert [text.decode([t]) for t in text.encode("a1234")] == pieces


@pytest.mark.parametrize(("model", "pre"), [("llama", "gpt-2"), ("gpt2", "deepseek-llm"), ("t5", "gpt-2")])
def test_gguf_tokenizers_that_are_not_computed_are_refused(tmp_path: Path, model: str, pre: str) -> None:
    named = pre if model == "gpt2" else model
    with pytest.raises(UnsupportedModel, match=named):
        TextModel.load(gguf_file(tmp_path / "a.gguf", model=model, pre=pre))


def vocabulary(*tokens: bytes) -> TextModel:
    return TextModel(list(tokens), frozenset(), Tokenizer(models.BPE()), None)


def test_tokenizers_that_agree_up_to_padding() -> None:
    check_tokenizers("big", vocabulary(b"a", b"bc", b"", b""), "small", vocabulary(b"a", b"bc"))
    check_tokenizers("big", vocabulary(b"a", b"bc"), "small", vocabulary(b"a", b"bc", b""))


@pytest.mark.parametrize("other", [(b"a", b"cb"), (b"a",), (b"a", b"bc", b"d")])
def test_tokenizers_that_differ_are_refused_by_the_first_token(other: tuple[bytes, ...]) -> None:
    with pytest.raises(
        SkippyError, match=r"^draft\.path: small has another tokenizer than big: token [12] is "
    ):
        check_tokenizers("big", vocabulary(b"a", b"bc"), "small", vocabulary(*other))
