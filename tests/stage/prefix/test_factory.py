"""Which prefix store a stage gets for which payload and engine (spec 4.1)."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from skippy_stage.errors import SkippyError
from skippy_stage.prefix import NoPrefixes, make_prefix_store
from skippy_stage.prefix.exact import ExactPrefixes
from skippy_stage.prefix.resident import ResidentPrefixes

from tests.scripted import RecurrentEngine, ScriptedEngine
from tests.stage.prefix.driving import forward


class Stateless(RecurrentEngine):
    """Offers neither blocks nor states."""

    @property
    def exact_state(self) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize(
    ("engine", "payload", "kind", "name"),
    [
        (ScriptedEngine, "off", NoPrefixes, "off"),
        (ScriptedEngine, "auto", ResidentPrefixes, "resident-kv"),
        (ScriptedEngine, "resident-kv", ResidentPrefixes, "resident-kv"),
        (ScriptedEngine, "full-state", ExactPrefixes, "full-state"),
        (ScriptedEngine, "kv-recurrent", ExactPrefixes, "kv-recurrent"),
        (RecurrentEngine, "auto", ExactPrefixes, "kv-recurrent"),
        (RecurrentEngine, "full-state", ExactPrefixes, "full-state"),
        (RecurrentEngine, "kv-recurrent", ExactPrefixes, "kv-recurrent"),
        (RecurrentEngine, "off", NoPrefixes, "off"),
    ],
)
def test_the_payload_and_the_engine_decide(
    engine: Any, payload: Any, kind: type, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_prefix_store(engine(), payload)
    assert isinstance(store, kind)
    assert store.status().payload == name
    assert not caplog.records


@pytest.mark.parametrize(
    ("engine", "payload"),
    [(RecurrentEngine, "resident-kv"), (Stateless, "auto"), (Stateless, "full-state")],
)
def test_what_an_engine_cannot_do_is_off_with_a_warning(
    engine: Any, payload: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        store = make_prefix_store(engine(), payload)
    assert isinstance(store, NoPrefixes)
    assert caplog.messages == [f"no prefix cache: engine scripted cannot keep prefixes as {payload!r}"]


@pytest.mark.parametrize(
    ("engine", "given", "kept"),
    [(RecurrentEngine, 64, 16), (RecurrentEngine, 3, 3), (ScriptedEngine, 20, 20)],
)
def test_exact_states_are_bounded(engine: Any, given: int, kept: int) -> None:
    stage = engine()
    store = make_prefix_store(stage, "full-state", max_entries=given)
    for session in range(25):
        stage.open(session, 8)
        forward(stage, (session, 0, [session]))
        store.record(session, "", [session])
    assert store.status().entries == kept


def test_bounds_are_passed_on() -> None:
    engine = ScriptedEngine()
    engine.open(1, 64)
    forward(engine, (1, 0, range(40)))
    assert make_prefix_store(engine, "auto", max_tokens=10).record(1, "", range(40)) == 10
    exact = make_prefix_store(engine, "full-state", max_bytes=10)
    assert exact.record(1, "", range(40)) == 0
    assert exact.status().dropped == 1


def test_no_prefixes() -> None:
    store = NoPrefixes()
    assert store.probe(1, "", [1, 2]).longest == 0
    assert store.record(1, "", [1, 2]) == 0
    assert store.leased(1) == store.restore(1, 0) == ()
    with pytest.raises(SkippyError, match="restore of 1 positions, 0 are leased"):
        store.restore(1, 1)
    store.release(1)
    store.release_all()
    store.check_integrity()
    assert store.status().payload == "off"
