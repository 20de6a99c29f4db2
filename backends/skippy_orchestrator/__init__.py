"""The orchestrator: requests, text, sessions, scheduler and pipeline."""
