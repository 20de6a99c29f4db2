"""The prefix memory of a stage: what sessions computed, kept for sessions that start the same (spec 4)."""

from skippy_stage.prefix.activations import ActivationCache
from skippy_stage.prefix.factory import make_prefix_store
from skippy_stage.prefix.store import NoPrefixes, PrefixStore

__all__ = ["ActivationCache", "NoPrefixes", "PrefixStore", "make_prefix_store"]
