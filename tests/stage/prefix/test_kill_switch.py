"""The kill switch: spec 10.3."""

from __future__ import annotations

import pytest
from skippy_stage.prefix.kill_switch import KILL_SWITCHES, prefix_cache_killed


@pytest.mark.parametrize("name", ["SKIPPY_KV_CACHE", "SKIPPY_PREFIX_CACHE"])
@pytest.mark.parametrize("value", ["0", "off", "false", "disabled", "disable", "OFF", "False", " Off "])
def test_either_variable_says_off(name: str, value: str) -> None:
    other = next(variable for variable in KILL_SWITCHES if variable != name)
    assert prefix_cache_killed({name: value})
    assert prefix_cache_killed({name: value, other: "on"}), "an on in one does not mask an off in the other"


@pytest.mark.parametrize(
    "value",
    ["", "1", "on", "true", "record", "lookup-record", "auto", "no", "none", "00", "0.0", "dis-abled"],
)
def test_everything_else_changes_nothing(value: str) -> None:
    assert not prefix_cache_killed(dict.fromkeys(KILL_SWITCHES, value))


def test_other_variables_do_not_count() -> None:
    assert not prefix_cache_killed({})
    assert not prefix_cache_killed({"SKIPPY_KV_CACHE_MAX_BYTES": "0", "skippy_kv_cache": "off"})
