"""The prefix cache as the orchestrator sees it: what to look up, what to restore, what to record, what to report."""
