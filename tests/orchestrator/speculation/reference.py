"""The spec's reference of the decode paths (its appendix A), and the target that it runs against.

An oracle: written as one loop that waits for every answer, where the machine is asked for work and told answers.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from skippy_orchestrator.speculation.classify import split_len

Draft = Callable[[Sequence[int], int], list[int]]


class Suffix:
    """The suffix proposer, without an index that outlives a call."""

    def __init__(self, min_match: int, window: int, max_proposal: int) -> None:
        self.min_match, self.window, self.max_proposal = min_match, window, max_proposal

    def propose(self, history: Sequence[int], continuation: Sequence[int], limit: int) -> list[int]:
        query = [*history, *continuation]
        seed = min(self.min_match, 8)
        if limit <= 0 or len(query) < self.min_match:
            return []
        best = end = seen = 0
        for e in range(len(history) - 2, seed - 2, -1):
            if list(history[e - seed + 1 : e + 1]) != query[-seed:]:
                continue
            seen += 1
            match = 0
            while match < min(self.window, e + 1, len(query)) and history[e - match] == query[-1 - match]:
                match += 1
            if match > best:
                best, end = match, e
            if best >= self.window or seen >= 64:
                break
        if best < self.min_match:
            return []
        return list(history[end + 1 : end + 1 + min(limit, self.max_proposal, max(2 * best, 4))])


class Target:
    """All stages as one: an authoritative position, predictions by a function of the text, drafts of a head."""

    def __init__(
        self,
        function: Callable[[Sequence[int]], int],
        mtp: int = 0,
        mtp_errors: float = 0.0,
        seed: int = 0,
        *,
        stops_early: bool = False,
    ) -> None:
        self.kv: list[int] = []
        self._function = function
        self._mtp = mtp
        self._errors = mtp_errors
        self._random = random.Random(seed)
        self._stops_early = stops_early

    def run(
        self, position: int, inputs: Sequence[int], *, verify: bool = False
    ) -> tuple[list[int], list[int]]:
        """Predictions for the inputs, and the head's draft behind the last one."""
        del self.kv[position:]
        assert len(self.kv) == position, f"a gap: {len(self.kv)} positions, {position} wanted"
        out = []
        for token in inputs:
            self.kv.append(token)
            out.append(self._function(self.kv))
        if self._stops_early and verify:
            for i in range(len(inputs) - 1):
                if out[i] != inputs[i + 1]:
                    out = out[: i + 1]
                    break
        draft: list[int] = []
        history = [*self.kv[: position + len(out)], out[-1]]
        for _ in range(self._mtp):
            token = self._function(history)
            token += self._random.random() < self._errors
            draft.append(token)
            history.append(token)
        return out, draft


def target_function(vocabulary: int, seed: int, repeats: int) -> Callable[[Sequence[int]], int]:
    """A text that goes on by counting ``repeats`` percent of the time, and jumps otherwise."""

    def function(prefix: Sequence[int]) -> int:
        last = tuple(prefix[-3:])
        digest = hashlib.blake2b(repr((seed, last)).encode(), digest_size=8).digest()
        mixed = int.from_bytes(digest, "little")
        return (prefix[-1] + 1) % vocabulary if mixed % 100 < repeats else (mixed >> 8) % vocabulary

    return function


@dataclass(slots=True)
class ReferencePlan:
    """The plan as the reference names it."""

    mtp: int = 0
    extension: int = 0
    ngram: tuple[int, int, int] | None = None
    max_draft: int = 1
    min_draft: int = 0
    verify_max: int = 4
    verify_min: int = 1
    depth: int = 1
    threshold: float = 0.0
    split: float = 0.0
    cooldown: int = 0
    suppress: bool = False
    suppress_limit: int = 0
    window: int = 4
    adaptive: bool = False
    draft: Draft | None = None


def met(accepted: int, count: int, threshold: float) -> bool:
    return count == 0 or threshold <= 0 or accepted == count or accepted / count >= threshold


def decode(
    prompt: Sequence[int],
    max_tokens: int,
    target: Target,
    ends: Collection[int],
    plan: ReferencePlan,
    stats: dict[str, int],
) -> list[int]:
    """The text of the reference; ``stats`` gets its counters."""
    start, done, cur = len(prompt) - 1, 0, prompt[-1]
    ctx, out = list(prompt), []
    if start:
        target.run(0, prompt[:-1])
    ngram = Suffix(*plan.ngram) if plan.ngram else None
    hybrid = bool(plan.extension and ngram)
    ngram_on = ngram is not None and (bool(plan.extension) or not plan.mtp)
    horizon = plan.extension or (plan.ngram[2] if plan.ngram else 0)
    verify_on = bool(plan.mtp or hybrid) and not plan.draft
    piped = bool(hybrid or (not plan.mtp and ngram)) and not plan.draft and plan.depth > 1
    vmax = max(plan.verify_max, 1)
    vmin = min(max(plan.verify_min, 1), vmax)
    verify_width = max(min(vmax, 2), vmin)
    max_window = max(plan.window, 1)
    window = min(max_window, 4) if plan.adaptive else max_window
    pending: list[int] | None = None
    cooldown = suppress_left = 0
    buffer: list[int] = []
    native_left = 0
    queue: deque[dict[str, Any]] = deque()
    pipe: dict[str, Any] | None = None
    boundary: int | None = None
    epoch = 0

    def count(name: str) -> None:
        stats[name] = stats.get(name, 0) + 1

    def limit_of(available: int) -> int:
        return 0 if horizon < 2 or available < 2 else min(available, horizon)

    def compose(native: list[int], total: int, most: int) -> list[int]:
        native = native[:total]
        if not ngram_on or horizon == 0 or most == 0:
            return native
        n = min(total - len(native), horizon, most)
        tail = ngram.propose(ctx, native, n)[:n] if ngram and n > 0 else []
        return native + (tail if len(tail) >= min(2, most) else [])

    def emit(tokens: Sequence[int]) -> bool:
        nonlocal cur, done
        for token in tokens:
            cur, done = token, done + 1
            ctx.append(token)
            out.append(token)
            if token in ends or max_tokens <= done:
                return True
        return False

    def classify(drafts: Sequence[int], predicted: Sequence[int]) -> tuple[int, int, bool]:
        for i, token in enumerate(drafts, 1):
            if predicted[i - 1] != token:
                return i - 1, i, True
            if token in ends or max_tokens <= done + i:
                return i, i, False
        return len(drafts), min(len(drafts) + 1, max_tokens - done), False

    while max_tokens > done:
        remaining = max_tokens - done
        seed = None
        if piped and pipe is None and all(w["stale"] for w in queue):
            native = (pending or [])[: plan.max_draft][: remaining - 1] if plan.mtp and cooldown == 0 else []
            native = native if len(native) >= plan.min_draft else []
            proposal = compose(native, remaining, limit_of(remaining - len(native)))
            if len(proposal) >= 2 and horizon >= 2:
                seed, pending = (proposal, min(len(native), len(proposal))), None
        idle = not piped or (pipe is None and seed is None and not queue)
        if verify_on and cooldown == 0 and remaining >= 2 and idle:
            if not buffer:
                native = (pending or [])[: plan.max_draft][: remaining - 1] if plan.mtp else []
                pending = None
                native = native if len(native) >= plan.min_draft else []
                buffer = compose(native, remaining - 1, limit_of(remaining - len(native) - 1))
                native_left = min(len(native), len(buffer))
            if buffer:
                tokens = buffer[:verify_width]
                k = len(tokens)
                predicted, draft = target.run(start + done, [cur, *tokens], verify=True)
                accepted, commit, rejected = classify(tokens, predicted)
                base = done
                stop = emit(predicted[:commit])
                free = predicted[k] if len(predicted) > k else None
                full = not rejected and accepted == k and done - base == k + 1 and not stop
                dependent_rejected = False
                if full:
                    rest = buffer[k:]
                    if rest and rest[0] == free:
                        rest = rest[1:]
                    elif rest:
                        rest, dependent_rejected = [], True
                    native_rejected = dependent_rejected and native_left > k
                    native_left = max(native_left - (len(buffer) - len(rest)), 0)
                    buffer = rest
                else:
                    native_rejected = accepted < native_left
                    buffer, native_left = [], 0
                verify_width = min(verify_width + 1, vmax) if full else max(verify_width - 1, vmin)
                count("verify_windows")
                if native_rejected and plan.cooldown:
                    cooldown, suppress_left, pending = plan.cooldown, plan.suppress_limit, None
                if not buffer and full and not native_rejected and max_tokens > done and draft:
                    pending = draft
                if stop:
                    break
                continue
        if piped:
            if seed:
                epoch, boundary = epoch + 1, None
                pipe = {"all": list(seed[0]), "left": list(seed[0]), "native": seed[1]}
                pipe |= {"sent": 0, "accepted": 0, "next": None}
            if pipe:
                width = split_len(vmax, plan.split, done + epoch)
                while len(queue) < plan.depth:
                    advance = sum(len(w["chunk"]) for w in queue if not w["stale"])
                    if done + advance >= max_tokens:
                        break
                    if len(pipe["left"]) < width:
                        suffix = pipe["all"][pipe["accepted"] :]
                        budget = limit_of(min(horizon, max(remaining - len(suffix), 0)))
                        more = ngram.propose(ctx, suffix, budget) if ngram and budget and ngram_on else []
                        pipe["all"] += more
                        pipe["left"] += more
                    if not pipe["left"]:
                        break
                    chunk, pipe["left"] = pipe["left"][:width], pipe["left"][width:]
                    first = pipe["sent"] == 0
                    pipe["sent"] += len(chunk)
                    position = start + done + advance + (not first)
                    predicted, draft = target.run(position, ([cur] if first else []) + chunk, verify=True)
                    queue.append(
                        {"epoch": epoch, "stale": False, "first": first, "chunk": chunk}
                        | {"predicted": predicted, "draft": draft}
                    )
                    stats["max_in_flight"] = max(stats.get("max_in_flight", 0), len(queue))
            if queue:
                item = queue.popleft()
                if item["stale"]:
                    count("stale_windows")
                    continue
                assert item["epoch"] == epoch
                assert pipe is not None
                k = len(item["chunk"])
                judged = item["predicted"][: k + 1] if item["first"] else [boundary, *item["predicted"][:k]]
                accepted, commit, rejected = classify(item["chunk"], judged)
                enough = met(accepted, k, plan.threshold)
                full = enough and not rejected and accepted == k
                dependent = any(not w["stale"] for w in queue) or bool(pipe["left"])
                commit = k if full and dependent else (commit if enough else 1)
                if full:
                    pipe["next"] = item["draft"] if plan.mtp else None
                pipe["accepted"] += accepted if enough else 0
                count("pipelined_windows")
                stop = emit(judged[:commit])
                if not full or stop:
                    for w in queue:
                        w["stale"] = True
                    if rejected and pipe["accepted"] < pipe["native"] and plan.cooldown:
                        cooldown, suppress_left = plan.cooldown, plan.suppress_limit
                    pipe = boundary = pending = None
                    if stop:
                        break
                else:
                    boundary = judged[k]
                    if all(w["stale"] for w in queue) and not pipe["left"]:
                        pending, pipe = pipe["next"], None
                continue
        if plan.draft or (ngram and not piped):
            limit = min(remaining, window)
            drafts = plan.draft(ctx, limit) if plan.draft else []
            if not drafts and ngram:
                drafts = ngram.propose(ctx, [], limit)
            drafts = drafts[: split_len(len(drafts), plan.split, done)]
            if drafts:
                predicted, _ = target.run(start + done, [cur, *drafts[:-1]])
                accepted = 0
                k = len(drafts)
                kind, commit = "full", k
                for i, (d, p) in enumerate(zip(drafts, predicted, strict=True), 1):
                    end = p in ends or max_tokens <= done + i
                    if d != p:
                        kind, commit = ("tail" if i == k else "early_stop" if end else "early"), i
                        break
                    accepted += 1
                    if end and i < k:
                        kind, commit = "accepted_stop", i
                        break
                if not met(accepted, k, plan.threshold) and kind not in ("accepted_stop", "early_stop"):
                    kind, commit = "early", 1
                if plan.adaptive and kind in ("full", "tail"):
                    window = min(window + 1, max_window)
                elif plan.adaptive and kind == "early":
                    window = min(window, max(window - 1, commit, 1))
                count("serial_windows")
                if emit(predicted[:commit]):
                    break
                continue
        predicted, draft = target.run(start + done, [cur])
        if cooldown > 0 and (plan.suppress or suppress_left > 0):
            draft, suppress_left = [], max(suppress_left - 1, 0)
        pending = draft if plan.mtp and draft else None
        cooldown = max(cooldown - 1, 0)
        count("serial_steps")
        if emit(predicted):
            break
    return out
