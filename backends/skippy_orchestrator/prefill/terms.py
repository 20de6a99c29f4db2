"""What all prompts of a deployment have in common on their way through the stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skippy_orchestrator.prefill.machine import PrefillMachine
from skippy_orchestrator.prefill.planner import PrefillPolicy
from skippy_orchestrator.prefill.transport import TransportPool


@dataclass(frozen=True, slots=True)
class PrefillTerms:
    """How prompts are cut: the policy, the credits, and what is known of the way to the stages."""

    policy: PrefillPolicy
    credits: int
    transport: TransportPool

    def machine(self, n_prompt: int, start: int, boundaries: Sequence[int]) -> PrefillMachine:
        """The machine for a prompt of which ``start`` positions are restored."""
        planner = self.policy.planner()
        self.transport.prepare(planner)
        return PrefillMachine(n_prompt, planner, self.credits, start, boundaries)
