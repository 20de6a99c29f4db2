"""What ``skippy status`` shows of speculative decoding: a line of totals, and one of the MTP head."""

from __future__ import annotations

from rich.text import Text

from skippy_client.cli_output import number, part_of
from skippy_client.types import ServerStatus


def speculation_line(status: ServerStatus) -> Text | None:
    """Drafts that were right of all that were verified; None before the first draft.

    Tokens per window count the target's own token, so 1 is what decoding without drafts gives.
    """
    speculation = status.speculation
    if speculation is None or not speculation.draft_tokens:
        return None
    parts = ["speculation", f"right {part_of(speculation.accepted_draft_tokens, speculation.draft_tokens)}"]
    if speculation.mean_acceptance_length is not None:
        parts.append(f"tokens per window {speculation.mean_acceptance_length:.2f}")
    parts += [
        f"{source} {accepted / tokens:.0%}"
        for source, (tokens, accepted) in speculation.by_source.items()
        if tokens
    ]
    return Text("  ".join(parts))


def head_line(status: ServerStatus) -> Text | None:
    """What the last stage's MTP head did; None for a model without one."""
    head = status.stages[-1].head if status.stages else None
    if head is None or not head.layers:
        return None
    line = Text(f"MTP head  drafts {number(head.drafts)}")
    if head.busy_us is not None:
        line.append(f"  busy {head.busy_us / 1e6:.1f} s")
    if head.failures:
        line.append(f"  failures {number(head.failures)}", style="yellow")
    return line
