"""The orchestrator's side of the prefix caches: who may restore, what is known without asking, what is learned.

Stages hold the prefixes. What is held here is small: output tokens of finished prompts, and which prompts
were ever recorded, so that one that no stage can know costs no probe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from skippy_stage.protocol import StageStatus

from skippy_orchestrator.deployment import PrefixCacheSection
from skippy_orchestrator.prefix.fingerprint import namespace_of, replay_safe, sampling_fingerprint
from skippy_orchestrator.prefix.outcome import lookup_bypass
from skippy_orchestrator.prefix.output_tokens import OutputKey, OutputTokenCache
from skippy_orchestrator.prefix.recorded import RecordedPrefixes
from skippy_orchestrator.prefix.session import OFF, PrefixTerms
from skippy_orchestrator.requests import GenerationRequest


@dataclass(frozen=True, slots=True)
class StageFacts:
    """What the stages of a pipeline say about themselves that matters here."""

    stages: int = 1
    hidden_size: int = 0
    identity: str = ""
    """Names everything that decides a token beside prompt and sampling (spec 4.2)."""
    stores: bool = False
    """Every stage keeps prefixes."""
    head: bool = False
    """The last stage has an MTP head."""
    exact: bool = False
    """A stage keeps states that can't be cut."""

    @classmethod
    def of(cls, stages: Sequence[StageStatus]) -> StageFacts:
        """Those of a pipeline's stages."""
        payloads = {stage.prefix.payload for stage in stages}
        return cls(
            stages=len(stages),
            hidden_size=stages[0].hidden_size,
            identity="|".join(stage.identity for stage in stages),
            stores="off" not in payloads,
            head=stages[-1].head.layers > 0,
            exact=bool(payloads - {"resident-kv", "off"}),
        )


@dataclass(slots=True)
class PrefixMemory:
    """What outlives a pipeline: tokens stay true when stages restart, the identity is in their key."""

    outputs: OutputTokenCache
    recorded: RecordedPrefixes = field(default_factory=RecordedPrefixes)

    @classmethod
    def of(cls, section: PrefixCacheSection) -> PrefixMemory:
        """An empty one with the section's limits."""
        return cls(OutputTokenCache(section.max_entries))


class PrefixCache:
    """Decides for every session what may be restored and recorded."""

    def __init__(
        self, section: PrefixCacheSection, tokenizer: str, facts: StageFacts, memory: PrefixMemory
    ) -> None:
        self._section = section
        self._tokenizer = tokenizer
        self._facts = facts
        self._memory = memory

    @property
    def shares_blocks(self) -> bool:
        """Whether what is restored is shared between sessions; exact states are copied into a session's own room."""
        return not self._facts.exact

    @property
    def native_mtp(self) -> bool:
        """Whether requests can draft with an MTP head: there is one, and its state can be cut."""
        return self._facts.head and not self._facts.exact

    def terms(
        self, request: GenerationRequest, *, native_mtp: bool = False, draft_model: bool = False
    ) -> PrefixTerms:
        """What holds for a session that starts now, and drafts in this way."""
        section, facts = self._section, self._facts
        if section.mode == "disabled" or not facts.stores:
            return OFF
        lookup = lookup_bypass(
            section, native_mtp, draft_model, n_prompt=len(request.prompt), replay_safe=replay_safe(request)
        )
        namespace = namespace_of(self._tokenizer, request.cache_key, native_mtp=native_mtp)
        known = self._memory.recorded.may_match(namespace, request.prompt, section.min_tokens)
        key = self._output_key(request, namespace)
        outputs: tuple[int, ...] = ()
        if lookup.restore and known and key is not None:
            most = min(section.replay_tokens, request.max_tokens)
            outputs = self._known_outputs(key, most if lookup.replay else min(most, lookup.first_token))
        return PrefixTerms(
            lookup=lookup,
            namespace=namespace,
            probes=lookup.restore and known,
            outputs=outputs,
            output_key=key,
            records=True,
            record_output=section.record_output,
            exact=facts.exact,
            speculate_after_restore=section.speculate_after_restore,
            chat_prefix=request.chat_prefix,
            min_tokens=section.min_tokens,
            stride_tokens=section.stride_tokens,
            record_limit=section.record_limit,
            stages=facts.stages,
            hidden_size=facts.hidden_size,
        )

    def recorded(self, namespace: str, tokens: Sequence[int]) -> None:
        """Stages were asked to record these tokens."""
        self._memory.recorded.add(namespace, tokens, self._section.min_tokens)

    def learned(self, key: OutputKey, outputs: Sequence[int], first_new: int) -> None:
        """The first outputs of a prompt are known; those before ``first_new`` were noted before."""
        for index in range(first_new, min(len(outputs), self._section.replay_tokens)):
            if index == 0:
                self._memory.outputs.record_first_token(key, outputs[0])
            self._memory.outputs.record_replay(key, tuple(outputs[:index]), outputs[index])

    def _output_key(self, request: GenerationRequest, namespace: str) -> OutputKey | None:
        section = self._section
        if not section.replay_tokens or len(request.prompt) < section.min_tokens or not replay_safe(request):
            return None
        fingerprint = sampling_fingerprint(request.sampling)
        return OutputKey.of(request.prompt, namespace, fingerprint, self._facts.identity)

    def _known_outputs(self, key: OutputKey, most: int) -> tuple[int, ...]:
        replay = self._memory.outputs.replay(key, most) if most > 1 else ()
        if replay or most < 1:
            return replay
        first = self._memory.outputs.first_token(key)
        return () if first is None else (first,)
