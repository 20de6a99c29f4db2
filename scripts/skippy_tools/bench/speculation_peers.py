"""Peers with their own ways to guess ahead: transformers' prompt lookup and assistant, llama.cpp's prompt lookup."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from skippy_tools.bench.peers import TransformersModel
from skippy_tools.bench.running import Task, in_turns
from skippy_tools.bench.speculation_plan import RANDOM_SEED, RANDOM_TEMPERATURE
from skippy_tools.bench.speculation_rows import Sample
from skippy_tools.bench.workload import Tokens

LOOKUP_TOKENS: Final = 10
"""Drafts per step: what both peers' own documentation uses."""
WARM_UP_TOKENS: Final = 4
ASSISTANT_LAYERS: Final = 8
"""The assistant is the model's own first layers: there is no smaller one with its tokenizer."""


class _Transformers(TransformersModel):
    """``generate`` with options on top."""

    def rate(self, kind: str, prompt: Sequence[int], count: int, options: dict[str, Any]) -> float:
        """Tokens per second behind the first one."""
        torch = self._torch
        ids = torch.tensor([list(prompt)])
        sampled = {"do_sample": True, "temperature": RANDOM_TEMPERATURE, "top_k": 0}
        how = sampled if kind == "random" else {"do_sample": False}
        times = []
        for tokens in (1, count):
            torch.manual_seed(RANDOM_SEED)
            with torch.inference_mode():
                started = time.perf_counter()
                self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=tokens,
                    min_new_tokens=tokens,
                    pad_token_id=0,
                    **how,
                    **(options if tokens > 1 else {}),
                )
                times.append(time.perf_counter() - started)
        return (count - 1) / max(times[1] - times[0], 1e-9)


def transformers_rates(
    model: Path, prompts: dict[str, Tokens], tokens: int, rounds: int
) -> dict[tuple[str, str], list[Sample]]:
    """Rounds by subject and prompt kind; each subject takes turns with the others."""
    peer = _Transformers(model)
    subjects: dict[str, dict[str, Any]] = {
        "transformers": {},
        "transformers_lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
        "transformers_assisted": {"assistant_early_exit": ASSISTANT_LAYERS},
    }
    keys = [(subject, kind) for kind in prompts for subject in subjects]

    def once(subject: str, kind: str, count: int) -> Callable[[], Sample]:
        return lambda: Sample(peer.rate(kind, prompts[kind], count, subjects[subject]))

    tasks = [Task(once(*key, tokens), rounds, once(*key, WARM_UP_TOKENS)) for key in keys]
    try:
        return dict(zip(keys, in_turns(tasks), strict=True))
    finally:
        peer.close()


def llama_cpp_rates(
    model: Path, prompts: dict[str, Tokens], tokens: int, rounds: int, threads: int
) -> dict[tuple[str, str], list[Sample]]:
    """Rounds of llama.cpp, plain and with llama-cpp-python's prompt lookup, by subject and prompt kind."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    def load(draft: Any) -> Any:
        return Llama(
            str(model), n_ctx=4096, n_threads=threads, n_threads_batch=threads, verbose=False,
            logits_all=draft is not None, draft_model=draft,
        )  # fmt: skip

    lookup = LlamaPromptLookupDecoding(max_ngram_size=3, num_pred_tokens=LOOKUP_TOKENS)
    subjects = {"llama_cpp_f16": load(None), "llama_cpp_f16_lookup": load(lookup)}
    keys = [(subject, kind) for kind in prompts for subject in subjects]

    def once(subject: str, kind: str) -> Callable[[], Sample]:
        temperature = RANDOM_TEMPERATURE if kind == "random" else 0.0

        def measure() -> Sample:
            llm = subjects[subject]
            llm.reset()
            started = 0.0
            drawn = llm.generate(list(prompts[kind]), temp=temperature, top_k=0 if temperature else 1)
            for came, _ in enumerate(drawn, 1):
                if came == 1:
                    started = time.perf_counter()
                if came == tokens:
                    break
            return Sample((tokens - 1) / (time.perf_counter() - started))

        return measure

    try:
        return dict(zip(keys, in_turns([Task(once(*key), rounds) for key in keys]), strict=True))
    finally:
        for llm in subjects.values():
            llm.close()
