"""The torch engine: Llama, Mistral, Qwen2, Qwen3 and MiMo on CPU and CUDA."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from skippy_stage.engines.base import (
    Batch,
    BatchOutput,
    DraftRows,
    EngineInfo,
    ExactState,
    KvUsage,
    PrefixBlocks,
    SequenceRows,
)
from skippy_stage.engines.kv_state import pack_kv, unpack_kv
from skippy_stage.engines.linear import check_f16_range, make_linear
from skippy_stage.engines.link import Link
from skippy_stage.engines.mtp import MtpHead
from skippy_stage.engines.sequences import BatchRows, SequenceStore
from skippy_stage.engines.stack import LayerStack, StackSettings, load_layer
from skippy_stage.errors import SkippyError
from skippy_stage.settings import StageSettings, WeightFormat
from skippy_stage.weights import locate, open_checkpoint, open_mtp_head
from skippy_stage.weights.checkpoint import EMBEDDING, FINAL_NORM, HEAD, MTP_PREFIX


class TorchEngine:
    """StageEngine on torch; loading reads only the tensors of the stage's own layers.

    Raises UnsupportedModel naming a feature of the model that is not computed, and SkippyError for a
    layer range or device that is not there.
    """

    def __init__(self, settings: StageSettings) -> None:
        checkpoint = open_checkpoint(locate(settings.model))
        config = checkpoint.config
        first, last = settings.first_layer, settings.last_layer
        if not first < last <= config.n_layers:
            raise SkippyError(f"layers [{first}, {last}) of a model with {config.n_layers}")
        device = _device(settings.device)
        self._device = device
        self._threads = settings.threads or available_threads()
        self._set_threads(self._threads)
        self._link = Link("f32" if settings.link_dtype == "auto" else settings.link_dtype)
        self._sequences = SequenceStore(settings.kv_tokens, settings.kv_block_tokens)
        self._vocab_size = config.vocab_size
        form = settings.weights
        half = form == "f16" and device.type == "cuda"
        self._compute = torch.float16 if half else torch.float32
        is_first, is_last = first == 0, last == config.n_layers
        head_file = locate(settings.mtp_head) if settings.mtp_head else None
        mtp = open_mtp_head(checkpoint, head_file) if is_last else None
        self._layers = range(last - first)
        self._kv_shape = (last - first + (mtp is not None), config.n_kv_heads, config.head_dim)
        with torch.inference_mode():
            layers = [
                load_layer(checkpoint, f"model.layers.{index}.", config, form, device)
                for index in range(first, last)
            ]
            self._embedding: npt.NDArray[np.generic] | None = None
            if is_first:
                table = checkpoint.tensor(EMBEDDING)
                if form != "f32":
                    check_f16_range(EMBEDDING, table)
                self._embedding = table.astype(np.float32 if form == "f32" else np.float16)
            self._head = None
            if is_last:
                self._head = make_linear(HEAD, checkpoint.tensor(HEAD), None, form, device)
                self._final_norm = torch.from_numpy(np.array(checkpoint.tensor(FINAL_NORM))).to(device)
            self._mtp: MtpHead | None = None
            self._seen = torch.empty(0, config.hidden_size)
            """Hidden rows of the last batch, for the head."""
            if mtp is not None and self._head is not None:
                layers.append(load_layer(mtp, f"{MTP_PREFIX}0.", config, form, device))
                self._mtp = MtpHead(
                    *(mtp, checkpoint, form, device, self._compute),
                    *(self._sequences, self._embedding, self._head, len(layers) - 1),
                )
            self._stack = _make_stack(
                StackSettings(
                    config=config,
                    layers=layers,
                    link=self._link,
                    blocks=self._sequences.pool.total,
                    block_tokens=settings.kv_block_tokens,
                    device=device,
                    kv_dtype=self._compute,
                )
            )
        names = [name for index in range(first, last) for name in checkpoint.layer_names(index)]
        names += [FINAL_NORM, HEAD] * is_last
        held = sum(checkpoint.weights(name) * _bytes_per_weight(name, form) for name in names)
        held += 0 if self._mtp is None else self._mtp.weight_bytes
        held += 0 if self._embedding is None else self._embedding.nbytes
        self._info = EngineInfo(
            engine=f"torch-{device.type}-{form}",
            architecture=config.architecture,
            first_layer=first,
            last_layer=last,
            n_layers=config.n_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            link_dtype=self._link.dtype,
            kv_block_tokens=settings.kv_block_tokens,
            kv_blocks=self._sequences.pool.total,
            weight_bytes=held,
            mtp_layers=int(self._mtp is not None),
        )
        self._warm_up()

    @property
    def info(self) -> EngineInfo:
        """See StageEngine."""
        return self._info

    def open(self, sequence: int, max_tokens: int) -> None:
        """See StageEngine."""
        self._sequences.open(sequence, max_tokens)

    def close(self, sequence: int) -> None:
        """See StageEngine."""
        self._sequences.close(sequence)

    def cached(self, sequence: int) -> int:
        """See StageEngine."""
        return self._sequences.cached(sequence)

    def forward(self, batch: Batch, *, threads: int | None = None) -> BatchOutput:
        """See StageEngine."""
        self._set_threads(threads or self._threads)
        with torch.inference_mode():
            x = self._input(batch)
            rows = self._sequences.extend(batch.sequences)
            try:
                return self._run(x, rows)
            except BaseException:
                # What was written is not to be believed; the caller may run the others again.
                for item in batch.sequences:
                    self._sequences.cut(item.sequence, item.past)
                raise

    def draft(self, rows: Sequence[DraftRows], *, threads: int | None = None) -> list[tuple[int, ...]]:
        """See StageEngine."""
        if self._mtp is None:
            raise SkippyError("the model has no MTP head")
        self._set_threads(threads or self._threads)
        with torch.inference_mode():
            return self._mtp.draft(self._stack, self._stack.normalise(self._seen, self._final_norm), rows)

    @property
    def prefix_blocks(self) -> PrefixBlocks:
        """See StageEngine."""
        return self._sequences

    @property
    def exact_state(self) -> ExactState:
        """See StageEngine."""
        return self

    def export(self, sequence: int) -> bytes:
        """See ExactState."""
        length = self.cached(sequence)
        if not length:
            raise SkippyError(f"sequence {sequence} has no positions to export")
        with torch.inference_mode():
            kv = self._stack.read_kv(self._sequences.blocks(sequence), length)
            return pack_kv(kv.cpu().contiguous().numpy())

    def load(self, sequence: int, state: bytes, length: int) -> None:
        """See ExactState."""
        if self.cached(sequence):
            raise SkippyError(f"sequence {sequence} has positions already, no state can be loaded")
        kv = unpack_kv(
            state, length, self._kv_shape, np.float16 if self._compute.itemsize == 2 else np.float32
        )
        self._sequences.extend([SequenceRows(sequence, 0, length)])
        try:
            with torch.inference_mode():
                self._stack.write_kv(self._sequences.blocks(sequence), torch.from_numpy(kv.copy()))
        except BaseException:
            self._sequences.cut(sequence, 0)
            raise

    def usage(self) -> KvUsage:
        """See StageEngine."""
        return self._sequences.usage()

    def check_integrity(self) -> None:
        """See StageEngine."""
        self._sequences.check_integrity()

    def shutdown(self) -> None:
        """See StageEngine; the engine is of no use afterwards."""
        del self._stack
        self._embedding = self._head = self._mtp = None

    def _input(self, batch: Batch) -> torch.Tensor:
        """The residual stream that enters, ``[rows, hidden]`` float32 on the device and ours to change."""
        total = sum(item.rows for item in batch.sequences)
        if not total:
            raise SkippyError("a batch without rows")
        if self._embedding is None:
            if batch.hidden is None or len(batch.hidden) != total:
                given = "none" if batch.hidden is None else len(batch.hidden)
                raise SkippyError(f"hidden rows: {given} given, {total} needed")
            return self._link.decode(batch.hidden, self._info.hidden_size).to(self._device)
        tokens = batch.token_ids
        if len(tokens) != total:
            raise SkippyError(f"token ids: {len(tokens)} given, {total} needed")
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._vocab_size:
            raise SkippyError(
                f"token ids from 0 to {self._vocab_size - 1}, got {tokens.min()} to {tokens.max()}"
            )
        rows = self._embedding[tokens].astype(np.float32)
        return torch.from_numpy(rows).to(self._device)

    def _run(self, x: torch.Tensor, rows: BatchRows) -> BatchOutput:
        self._stack.copy_blocks(rows.copies)
        self._stack.run(x, rows, self._layers)
        if self._link.dtype == "f16":
            self._check_finite(x, rows)
        if self._head is None:
            return BatchOutput(hidden=self._link.encode(x))
        if self._mtp is not None:
            self._seen = x
        wanted = [
            row
            for item, start in zip(rows.sequences, rows.starts, strict=True)
            for row in range(start + item.rows - item.logits, start + item.rows)
        ]
        if not wanted:
            return BatchOutput(logits=np.empty((0, self._vocab_size), np.float32))
        if len(wanted) != len(x):
            x = x[torch.tensor(wanted, device=self._device)]
        logits = self._head(self._stack.normalise(x, self._final_norm).to(self._compute))
        return BatchOutput(logits=logits.float().cpu().numpy())

    def _check_finite(self, x: torch.Tensor, rows: BatchRows) -> None:
        finite = torch.isfinite(x).all(1).cpu().numpy()
        if finite.all():
            return
        bad = int(np.argmin(finite))
        which = max(index for index, start in enumerate(rows.starts) if start <= bad)
        raise SkippyError(
            f"sequence {rows.sequences[which].sequence}: the hidden state at position {rows.positions[bad]} "
            "does not fit the float16 link; use link_dtype f32 or bf16"
        )

    def _warm_up(self) -> None:
        """Run a single row and a chunk once, so that the first request finds everything loaded."""
        rows = min(32, self._sequences.pool.total * self._sequences.pool.block_tokens)
        self.open(0, rows)
        for count in {1, rows}:
            tokens = np.zeros(count, np.int32)
            hidden = None
            if self._embedding is None:
                with torch.inference_mode():
                    hidden = self._link.encode(torch.zeros(count, self._info.hidden_size))
            self.forward(Batch([SequenceRows(0, 0, count, int(self._info.is_last))], tokens, hidden))
            if self._mtp is not None:
                self.draft([DraftRows(0, 0, 0, [0] * count, 1)])
        self.close(0)

    def _set_threads(self, threads: int) -> None:
        if self._device.type == "cpu" and threads != torch.get_num_threads():
            torch.set_num_threads(threads)


def available_threads() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _bytes_per_weight(name: str, form: WeightFormat) -> int:
    """What a weight takes: norms and biases stay float32 (on CUDA biases take the products' type)."""
    matrix = name.endswith("proj.weight") or name == HEAD
    return {"f32": 4, "f16": 2, "int8": 1}[form] if matrix else 4


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SkippyError(f"device {name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def _make_stack(settings: StackSettings) -> LayerStack:
    if settings.device.type == "cpu" and importlib.util.find_spec("numba") is not None:
        from skippy_stage.engines.cpu_stack import CpuStack

        return cast(LayerStack, CpuStack(settings))
    from skippy_stage.engines.torch_stack import TorchStack

    return cast(LayerStack, TorchStack(settings))
