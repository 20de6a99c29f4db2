from __future__ import annotations

from typing import Annotated

import msgspec
import pytest
from msgspec import Meta
from skippy_orchestrator.deployment import OrchestratorSettings
from skippy_stage.settings import StageSettings
from skippy_tools.generate_docs import CONFIGURATION, README
from skippy_tools.reference import BEGIN, END, keys, page, refresh, sections, tables


def test_the_committed_pages_are_up_to_date() -> None:
    assert CONFIGURATION.read_text(encoding="utf-8") == page(), "run ./scripts/generate_docs"
    if README.exists():
        text = README.read_text(encoding="utf-8")
        assert text == refresh(text), "run ./scripts/generate_docs"


def test_every_key_has_a_line_of_doc() -> None:
    for heading, section in sections():
        for key in keys(section):
            assert key.doc.endswith("."), f"{heading} {key.name}"
            assert key.kind
            assert "None" not in key.kind + key.default
    assert keys(StageSettings)


class Undocumented(msgspec.Struct):
    number: Annotated[int, Meta(ge=1)] = 1


def test_a_key_without_doc_is_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"Undocumented\.number has no description"):
        keys(Undocumented)


class Kinds(msgspec.Struct):
    """All kinds of keys."""

    needed: Annotated[str, Meta(description="a.")]
    ranged: Annotated[int, Meta(ge=1, le=2000, description="b | c.")] = 5
    open_end: Annotated[float, Meta(gt=0, description="d.")] = 0.5
    pair: Annotated[tuple[int, int] | None, Meta(description="e.")] = None
    names: Annotated[tuple[str, ...], Meta(description="f.")] = ("x",)
    switch: Annotated[bool, Meta(description="g.")] = False


def test_kinds_defaults_and_ranges() -> None:
    shown = {key.name: (key.kind, key.default, key.limits) for key in keys(Kinds)}
    assert shown == {
        "needed": ("string", "required", ""),
        "ranged": ("integer", "`5`", "1 to 2,000"),
        "open_end": ("number", "`0.5`", "above 0"),
        "pair": ("[integer, integer]", "", ""),
        "names": ("list of string", '`["x"]`', ""),
        "switch": ("true or false", "`false`", ""),
    }


def test_only_what_is_between_the_markers_changes() -> None:
    old = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    new = refresh(old)
    assert new == f"before\n{BEGIN}\n\n{tables('###')}\n{END}\nafter\n"
    assert refresh(new) == new
    assert refresh("no markers") == "no markers"
    with pytest.raises(ValueError, match="without"):
        refresh(f"{BEGIN} only")


def test_the_orchestrator_knows_the_sections_of_a_deployment() -> None:
    shared = {field.name for field in msgspec.structs.fields(OrchestratorSettings)}
    assert {"scheduler", "prefill", "prefix_cache", "limits", "sampling"} <= shared
