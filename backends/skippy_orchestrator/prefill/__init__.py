"""Prefill: how a prompt becomes chunks, several of them in flight, and what is learned from them.

``planner`` says how large a chunk should be, ``machine`` sends a prompt on its way within its credits,
``observations`` collects what the stages report, ``transport`` remembers it from request to request.
Pure: events and times come in as arguments.
"""

from skippy_orchestrator.prefill.machine import Chunk, PrefillMachine, PrefillSummary, chunk_end
from skippy_orchestrator.prefill.observations import (
    ComputeSample,
    PrefillReport,
    PrefillStats,
    ms_to_us,
    representative,
    us_to_ms,
)
from skippy_orchestrator.prefill.planner import (
    AdaptivePlanner,
    Planner,
    PolicyName,
    PrefillPolicy,
    ScheduledPlanner,
    parse_schedule,
)
from skippy_orchestrator.prefill.terms import PrefillTerms
from skippy_orchestrator.prefill.transport import TransportEstimate, TransportPool, TransportSeed

__all__ = [
    "AdaptivePlanner",
    "Chunk",
    "ComputeSample",
    "Planner",
    "PolicyName",
    "PrefillMachine",
    "PrefillPolicy",
    "PrefillReport",
    "PrefillStats",
    "PrefillSummary",
    "PrefillTerms",
    "ScheduledPlanner",
    "TransportEstimate",
    "TransportPool",
    "TransportSeed",
    "chunk_end",
    "ms_to_us",
    "parse_schedule",
    "representative",
    "us_to_ms",
]
