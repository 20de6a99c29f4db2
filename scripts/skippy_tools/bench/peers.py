"""Peers that run the same weights: transformers and llama.cpp.

Of each there is the model as such, which answers prompts, and a subject of ``bench decode`` made from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skippy_tools.bench.decode_rows import Sample
from skippy_tools.bench.workload import Workload

LLAMA_CPP_BATCH = 512
"""Rows that llama.cpp computes at once: the default of its ``n_ubatch``."""


def installed(module: str) -> bool:
    """Whether a peer's package is there."""
    return importlib.util.find_spec(module) is not None


class TransformersModel:
    """``transformers`` generate in f32, its default on CPU, one sequence."""

    subject = "transformers"
    concurrency = 1

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._torch = torch
        folder, options = (
            (str(model.parent), {"gguf_file": model.name}) if model.is_file() else (str(model), {})
        )
        with contextlib.redirect_stderr(io.StringIO()):  # the loader's own progress bar
            self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()

    def first_token_s(self, prompt: Sequence[int]) -> float:
        """Seconds from a prompt to its first token, nothing of it being cached."""
        return self.generate(prompt, 1)

    def generate(self, prompt: Sequence[int], count: int) -> float:
        """Seconds for ``count`` tokens behind a prompt."""
        torch = self._torch
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            started = time.perf_counter()
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
            )
            return time.perf_counter() - started

    def close(self) -> None:
        """Drop the model."""
        del self._model


class Transformers(TransformersModel):
    """The model as a subject of ``bench decode``."""

    def __init__(self, model: Path, workload: Workload) -> None:
        super().__init__(model)
        self._workload = workload

    def measure(self) -> Sample:
        """One round: decode rate from two generations of different length, prefill from the long prompt."""
        work = self._workload
        first = self.first_token_s(work.prompts[0])
        whole = self.generate(work.prompts[0], work.decode_tokens)
        long = self.first_token_s(work.long_prompt)
        return Sample((work.decode_tokens - 1) / (whole - first), len(work.long_prompt) / long, first * 1000)


def llama_cpp_f16(source: Path, target: Path) -> Path:
    """Write the same weights as an F16 GGUF file by llama.cpp's own converter, once."""
    if not target.exists():
        import llama_cpp

        _silence_log()
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_F16
        params.allow_requantize = True
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        if llama_cpp.llama_model_quantize(str(source).encode(), str(partial).encode(), ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp could not convert {source.name} to F16")
        partial.rename(target)
    return target


@functools.cache  # which also keeps the callback alive
def _silence_log() -> object:
    import llama_cpp

    callback = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    return callback


class LlamaCppModel:
    """llama.cpp F16 through its C interface: one sequence, or one batch of several.

    ``sequence_tokens`` is what each of ``concurrency`` sequences can hold.
    """

    subject = "llama_cpp_f16"

    def __init__(self, model: Path, sequence_tokens: int, concurrency: int, threads: int) -> None:
        import llama_cpp

        self.concurrency = concurrency
        self._c: Any = llama_cpp
        _silence_log()
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(model).encode(), llama_cpp.llama_model_default_params()
        )
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(self._vocab)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = concurrency * sequence_tokens
        params.n_seq_max = concurrency
        params.n_batch = params.n_ubatch = LLAMA_CPP_BATCH
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._batch = llama_cpp.llama_batch_init(LLAMA_CPP_BATCH, 0, 1)

    def first_token_s(self, prompt: Sequence[int]) -> float:
        """Seconds from a prompt to its first token, nothing of it being cached."""
        self.clear()
        started = time.perf_counter()
        self.prefill(0, prompt)
        return time.perf_counter() - started

    def clear(self) -> None:
        """Forget all sequences."""
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), True)

    def prefill(self, sequence: int, prompt: Sequence[int]) -> int:
        """Compute a sequence's prompt; returns its first token."""
        for start in range(0, len(prompt), LLAMA_CPP_BATCH):
            chunk = prompt[start : start + LLAMA_CPP_BATCH]
            rows = [(t, start + i, sequence, start + i == len(prompt) - 1) for i, t in enumerate(chunk)]
            self._run(rows)
        return self._argmax(len(chunk) - 1)

    def decode(self, tokens: Sequence[int], position: int) -> list[int]:
        """Compute the tokens that sequences 0, 1 and so on have at a position; returns their next ones."""
        self._run([(token, position, sequence, True) for sequence, token in enumerate(tokens)])
        return [self._argmax(row) for row in range(len(tokens))]

    def _run(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, logits) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = logits
        if self._c.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")

    def _argmax(self, row: int) -> int:
        import numpy as np

        logits = self._c.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())

    def close(self) -> None:
        """Free context and model."""
        self._c.llama_batch_free(self._batch)
        self._c.llama_free(self._context)
        self._c.llama_model_free(self._model)


class LlamaCpp(LlamaCppModel):
    """The model as a subject of ``bench decode``."""

    def __init__(self, model: Path, workload: Workload, concurrency: int, threads: int) -> None:
        each = max(len(workload.long_prompt), workload.prompt_tokens + workload.decode_tokens) + 64
        super().__init__(model, each, concurrency, threads)
        self._workload = workload

    def measure(self) -> Sample:
        """One round: prefill all sequences, decode them as one batch; the long prompt by itself."""
        work = self._workload
        prompts = work.prompts[: self.concurrency]
        self.clear()
        started = time.perf_counter()
        current = [self.prefill(i, prompt) for i, prompt in enumerate(prompts)]
        first = time.perf_counter()
        for step in range(work.decode_tokens - 1):
            current = self.decode(current, len(prompts[0]) + step)
        done = time.perf_counter()
        prefill = None
        if self.concurrency == 1:
            prefill = len(work.long_prompt) / self.first_token_s(work.long_prompt)
        decoded = self.concurrency * (work.decode_tokens - 1)
        ttft = (first - started) * 1000 if self.concurrency == 1 else None
        return Sample(decoded / (done - first), prefill, ttft)
