"""Where a model's tokenizer lies, and how it is read: a Hugging Face folder or the metadata of a GGUF file."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from skippy_stage.errors import SkippyError, UnsupportedModel
from skippy_stage.weights.gguf_header import GgufHeader, Scalar, read_header, read_strings
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

_CONTROL, _USER_DEFINED = 3, 4
"""Kinds of ``tokenizer.ggml.token_type`` that are matched whole in text; the first is never shown."""

_QWEN2_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_WORDS: Final = _QWEN2_WORDS.replace(r"+|\p{N}", r"+|\p{N}{1,3}")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a checkpoint says about its text."""

    tokenizer: Tokenizer
    bos_token: str
    """Empty when there is none."""
    eos_token: str
    end_tokens: frozenset[int]
    """Tokens that end a generation: those that the checkpoint names, no others."""
    chat_template: str
    """Empty when there is none."""


def read_vocabulary(path: Path) -> Vocabulary:
    """Read the tokenizer of a safetensors folder or a GGUF file; raises SkippyError or UnsupportedModel."""
    return _from_folder(path) if path.is_dir() else _from_gguf(path)


def _from_folder(folder: Path) -> Vocabulary:
    file = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise SkippyError(f"{file}: not a readable tokenizer: {error}") from None
    # Whoever wrote the file may have cut or padded a batch with it; a prompt is neither.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _json(folder / "tokenizer_config.json")
    ends = [_json(folder / name).get("eos_token_id") for name in ("generation_config.json", "config.json")]
    eos_token = _token_text(config.get("eos_token"))
    ends.append(tokenizer.token_to_id(eos_token) if eos_token else None)
    # The most specific source counts alone: generation_config.json overrides config.json.
    end_tokens = next((_ids(end) for end in ends if end is not None), frozenset())
    return Vocabulary(
        tokenizer,
        _token_text(config.get("bos_token")),
        eos_token,
        end_tokens,
        _folder_template(folder, config),
    )


def _json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SkippyError(f"{file}: not readable: {error}") from None
    if not isinstance(content, dict):
        raise SkippyError(f"{file}: not a JSON object")
    return content


def _token_text(token: object) -> str:
    """A token as tokenizer_config.json writes it: a string, or an object with ``content``."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _ids(value: int | list[int]) -> frozenset[int]:
    return frozenset([value] if isinstance(value, int) else value)


def _folder_template(folder: Path, config: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    return template if isinstance(template, str) else ""


def _from_gguf(path: Path) -> Vocabulary:
    if not path.is_file():
        raise SkippyError(f"{path}: does not exist")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = read_header(path, data)
        tokens = _strings(path, data, header, "tokenizer.ggml.tokens")
        kind = header.metadata.get("tokenizer.ggml.model")
        if kind != "gpt2":
            raise UnsupportedModel(f"{path}: tokenizer.ggml.model {kind!r} is not supported, only 'gpt2'")
        merges = _strings(path, data, header, "tokenizer.ggml.merges")
    metadata = header.metadata

    def token_id(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if isinstance(value, int) and 0 <= value < len(tokens) else None

    tokenizer = _byte_level_bpe(path, metadata, tokens, merges)
    bos, eos = token_id("bos"), token_id("eos")
    if metadata.get("tokenizer.ggml.add_bos_token") is True and bos is not None:
        tokenizer.post_processor = _prepend(tokens[bos], bos)
    ends = (eos, token_id("eot"), token_id("eom"))
    template = metadata.get("tokenizer.chat_template", "")
    return Vocabulary(
        tokenizer,
        "" if bos is None else tokens[bos],
        "" if eos is None else tokens[eos],
        frozenset(end for end in ends if end is not None),
        template if isinstance(template, str) else "",
    )


def _strings(path: Path, data: mmap.mmap, header: GgufHeader, key: str) -> list[str]:
    array = header.string_arrays.get(key)
    if array is None:
        raise SkippyError(f"{path}: no {key}")
    return read_strings(data, array)


def _byte_level_bpe(
    path: Path,
    metadata: dict[str, Scalar | tuple[Scalar, ...]],
    tokens: list[str],
    merges: list[str],
) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "gpt-2")
    words = _WORDS.get(name) if isinstance(name, str) else None
    if words is None:
        raise UnsupportedModel(
            f"{path}: tokenizer.ggml.pre {name!r} is not supported, only {', '.join(_WORDS)}"
        )
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    # Llama 3 keeps whole words that its merges don't lead to.
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=name == "llama-bpe")
    except Exception as error:  # the library raises plain Exception
        raise SkippyError(f"{path}: not a readable tokenizer: {error}") from None
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = words()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type")
    kinds = kinds if isinstance(kinds, tuple) else ()
    for kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        add(_added(tokens, kinds, kind))
    return tokenizer


def _added(tokens: list[str], kinds: Iterable[Scalar], kind: int) -> list[AddedToken]:
    return [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, k in zip(tokens, kinds, strict=False)
        if k == kind
    ]


def _prepend(token: str, token_id: int) -> Any:
    from tokenizers import processors

    return processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, token_id)])


def _plain() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digit_by_digit() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _plain()])


def _split(words: str) -> Callable[[], Any]:
    return lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_WORDS: Final[dict[str, Callable[[], Any]]] = {
    "gpt-2": _plain,
    "smollm": _digit_by_digit,
    "qwen2": _split(_QWEN2_WORDS),
    "llama-bpe": _split(_LLAMA3_WORDS),
}
"""How text is cut into words before merging, by ``tokenizer.ggml.pre``."""
