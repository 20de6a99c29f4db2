"""The deployment file: defaults, and everything wrong refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect
from skippy_orchestrator.deployment import (
    Deployment,
    LimitsSection,
    OrchestratorSettings,
    PrefillSection,
    PrefixCacheSection,
    SamplingSection,
    SchedulerSection,
    effective_context,
    load_deployment,
    parse_deployment,
)
from skippy_orchestrator.prefill import PrefillPolicy
from skippy_stage.settings import SettingsError, from_parameters, to_parameters

SECTIONS = {
    field.name: field.default.__class__
    for field in msgspec.structs.fields(Deployment)
    if field.name != "stages"
}
FIELDS = [(name, field) for name, kind in SECTIONS.items() for field in msgspec.structs.fields(kind)]
IDS = [f"{section}.{field.name}" for section, field in FIELDS]


def default_of(field: msgspec.structs.FieldInfo) -> object:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def limits_of(field: msgspec.structs.FieldInfo) -> inspect.IntType | inspect.FloatType | None:
    kind = inspect.type_info(field.type)
    kind = kind.type if isinstance(kind, inspect.Metadata) else kind
    return kind if isinstance(kind, inspect.IntType | inspect.FloatType) else None


def test_an_empty_file_is_the_default_deployment() -> None:
    deployment = parse_deployment("")
    assert deployment == Deployment()
    assert deployment.pipeline.stages == 2
    assert deployment.scheduler == SchedulerSection(
        max_frame_rows=256,
        max_sessions=64,
        frames_per_link=2,
        min_group_rows=4,
        prefill_rows_while_decoding=64,
    )
    assert deployment.prefill == PrefillSection(
        policy="adaptive-ramp",
        chunk_tokens=256,
        schedule="",
        adaptive_start=128,
        adaptive_step=128,
        adaptive_max=384,
        adaptive_target_ms=100.0,
        credits=3,
    )
    assert deployment.prefix_cache == PrefixCacheSection(
        mode="lookup-record",
        payload="auto",
        min_tokens=64,
        stride_tokens=128,
        record_limit=2,
        max_entries=64,
        max_bytes=0,
        activation_bytes=67_108_864,
        replay_tokens=8,
        record_output=True,
        bypass_native_mtp=False,
        speculate_after_restore=True,
    )
    assert deployment.limits.default_max_tokens == 256
    assert deployment.sampling == SamplingSection(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)
    assert deployment.server.aliases == ("ensemble", "tensorrt_llm_bls")


def test_the_defaults_may_be_written_down() -> None:
    lines = [f"{section}.{field.name} = {json.dumps(default_of(field))}" for section, field in FIELDS]
    assert parse_deployment("\n".join(lines)) == Deployment()


@pytest.mark.parametrize("wrong", ["[[]]", "{ a = 1 }", "true"])
@pytest.mark.parametrize(("section", "field"), FIELDS, ids=IDS)
def test_a_value_of_another_type_is_refused_by_name(
    section: str, field: msgspec.structs.FieldInfo, wrong: str
) -> None:
    if isinstance(field.default, bool) and wrong == "true":
        wrong = "1"
    with pytest.raises(SettingsError, match=rf"^deployment: .*`\$\.{section}\.{field.name}"):
        parse_deployment(f"[{section}]\n{field.name} = {wrong}")


@pytest.mark.parametrize(
    ("section", "field"), [pair for pair in FIELDS if limits_of(pair[1])], ids=lambda x: getattr(x, "name", x)
)
def test_every_number_has_a_range_and_keeps_to_it(section: str, field: msgspec.structs.FieldInfo) -> None:
    limits = limits_of(field)
    assert limits is not None
    step = 1 if isinstance(limits, inspect.IntType) else 0.001
    outside = []
    if limits.ge is not None:
        outside.append((limits.ge - step, limits.ge))
    if limits.gt is not None:
        outside.append((limits.gt, limits.gt))
    assert outside, "a number without a lower limit"
    if limits.le is not None:
        outside.append((limits.le + step, limits.le))
    if isinstance(limits, inspect.FloatType):
        outside += [(float("inf"), "finite" if limits.le is None else limits.le), (float("nan"), "")]
    for value, limit in outside:
        with pytest.raises(SettingsError, match=rf"^deployment: .*\$\.{section}") as refusal:
            parse_deployment(f"[{section}]\n{field.name} = {value}")
        assert field.name in refusal.value.message
        assert str(limit) in refusal.value.message


@pytest.mark.parametrize("section", [*SECTIONS, "stages"])
def test_unknown_keys_are_refused_by_name(section: str) -> None:
    header = "[[stages]]" if section == "stages" else f"[{section}]"
    with pytest.raises(SettingsError, match=rf"unknown field `speed` - at `\$\.{section}"):
        parse_deployment(f"{header}\nspeed = 1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[turbo]\non = true", r"unknown field `turbo`"),
        ("[kv]\ntokens = 15", r">= 16 - at `\$\.kv\.tokens`"),
        ("[scheduler]\nmax_frame_rows = 2049", r"<= 2048 - at `\$\.scheduler\.max_frame_rows`"),
        ("[prefill]\ncredits = 65", r"<= 64 - at `\$\.prefill\.credits`"),
        ("[scheduler]\nprefill_rows_while_decoding = -1", r">= 0 - at `\$\.scheduler\.prefill_rows_"),
        (
            '[prefill]\npolicy = "greedy"',
            r"policy: got 'greedy', expected fixed, schedule or .*`\$\.prefill`",
        ),
        ('[prefill]\npolicy = ""', r"policy: got '', expected .* - at `\$\.prefill`"),
        ('[prefill]\npolicy = "schedule"', r"schedule: got '', expected at least 1 size.*`\$\.prefill`"),
        ('[prefill]\nschedule = "64,,128"', r"schedule: got '' in '64,,128', expected.*`\$\.prefill`"),
        ('[prefill]\nschedule = "64, 0"', r"schedule: got '0' in '64, 0', expected.*`\$\.prefill`"),
        ('[prefill]\nschedule = "64x"', r"schedule: got '64x' in '64x', expected.*`\$\.prefill`"),
        (
            "[prefill]\nadaptive_start = 385",
            r"adaptive_start: got 385, expected at most adaptive_max, 384 - at `\$\.prefill`",
        ),
        (
            "[prefill]\nadaptive_max = 127",
            r"adaptive_start: got 128, expected at most adaptive_max, 127 - at `\$\.prefill`",
        ),
        ("[prefill]\nadaptive_target_ms = inf", r"adaptive_target_ms: got inf, expected a finite number"),
        ('[prefix_cache]\nmode = "exact"', r"'exact' - at `\$\.prefix_cache\.mode`"),
        ('[prefix_cache]\npayload = "off"', r"'off' - at `\$\.prefix_cache\.payload`"),
        ("[prefix_cache]\nreplay_tokens = 9", r"<= 8 - at `\$\.prefix_cache\.replay_tokens`"),
        ("[limits]\nqueue_timeout_s = 0", r"> 0\.0 - at `\$\.limits\.queue_timeout_s`"),
        ("[limits]\nframe_deadline_s = inf", r"frame_deadline_s: got inf, expected a finite number .*limits"),
        ("[sampling]\ntop_p = 0.0", r"> 0\.0 - at `\$\.sampling\.top_p`"),
        ("[model]\npath = ''", r"length >= 1 - at `\$\.model\.path`"),
        ('[pipeline]\ndevice = "cuda:x"', r"`\$\.pipeline\.device`"),
        ('[pipeline]\nweights = "q4"', r"'q4' - at `\$\.pipeline\.weights`"),
        ('[pipeline]\nlink_dtype = "f64"', r"'f64' - at `\$\.pipeline\.link_dtype`"),
        ("[[stages]]\nlayers = [1]", r"`\$\.stages\[0\]\.layers`"),
        ("[[stages]]\n[[stages]]\nthreads = -1", r">= 0 - at `\$\.threads` - at `\$\.stages\[1\]`"),
        ("[[stages]]\nthreads = 1025", r"<= 1024 - at `\$\.threads` - at `\$\.stages\[0\]`"),
        ('[[stages]]\ndevice = "tpu"', r"`\$\.device` - at `\$\.stages\[0\]`"),
        ('[[stages]]\nengine = ""', r"`\$\.engine` - at `\$\.stages\[0\]`"),
        ('[[stages]]\nweights = "q4"', r"`\$\.stages\[0\]\.weights`"),
        ('[server]\nname = "a b"', r"`\$\.server\.name`"),
        ('[server]\nname = ".."', r"got '\.\.' as a model's name.*`\$\.server`"),
        ('[server]\naliases = ["a", "../b"]', r"got '\.\./b' as a model's name.*`\$\.server`"),
        ('[server]\naliases = [""]', r"got '' as a model's name.*`\$\.server`"),
        ("[server]\nhttp_port = 65536", r"<= 65535 - at `\$\.server\.http_port`"),
        ("[kv\n", r"not TOML"),
        ("kv = 1\n[kv]", r"not TOML"),
    ],
)
def test_what_is_wrong_is_refused_with_the_key_and_the_limit(text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=rf"^my\.toml: .*{message}"):
        parse_deployment(text, "my.toml")


def test_a_file_is_named_when_it_cannot_be_read_or_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    with pytest.raises(SettingsError, match=r"a\.toml: No such file"):
        load_deployment(path)
    path.write_text("[kv]\ntokens = 20")
    assert load_deployment(path).kv.tokens == 20
    path.write_text("[kv]\ntokens = 2")
    with pytest.raises(SettingsError, match=r"a\.toml: Expected `int` >= 16"):
        load_deployment(path)


@pytest.mark.parametrize(("wanted", "model", "expected"), [(0, 64, 64), (64, 64, 64), (10, 64, 10)])
def test_the_context_is_the_models_own_or_less(wanted: int, model: int, expected: int) -> None:
    assert effective_context(wanted, model) == expected


def test_a_context_beyond_the_models_own_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"model\.context_tokens: got 65, expected at most 64"):
        effective_context(65, 64)


@pytest.mark.parametrize(
    ("text", "name", "sizes"),
    [
        ('policy = "fixed"\nadaptive_max = 127', "fixed", ()),
        ('policy = " Schedule "\nschedule = " 64 ,128"', "schedule", (64, 128)),
        ('policy = "adaptive"\nadaptive_start = 384', "adaptive-ramp", ()),
        ("adaptive_start = 1\nadaptive_step = 2048\nadaptive_max = 1", "adaptive-ramp", ()),
        ('policy = "fixed"\nschedule = "999999999999999999"', "schedule", (10**18 - 1,)),
    ],
)
def test_what_fits_together_is_taken_as_it_is_written(text: str, name: str, sizes: tuple[int, ...]) -> None:
    policy = PrefillPolicy.of(parse_deployment(f"[prefill]\n{text}").prefill)
    assert (policy.name, policy.sizes) == (name, sizes)


seconds = st.floats(0.001, 1e6)
sizes = st.lists(st.integers(1, 10**18 - 1), min_size=1).map(lambda some: ", ".join(map(str, some)))
chunking = st.builds(
    PrefillSection,
    policy=st.sampled_from(["fixed", "adaptive", " Adaptive-Ramp "]),
    schedule=st.just("") | sizes,
    chunk_tokens=st.integers(1, 2048),
    adaptive_start=st.integers(1, 384),
    adaptive_max=st.integers(384, 2048),
    adaptive_target_ms=st.floats(0.001, 1e6),
    credits=st.integers(0, 64),
) | st.builds(PrefillSection, policy=st.just("schedule"), schedule=sizes)
settings = st.builds(
    OrchestratorSettings,
    model=st.text(min_size=1),
    context_tokens=st.integers(0, 2**40),
    stages=st.lists(st.text(min_size=1), min_size=1).map(tuple),
    scheduler=st.builds(SchedulerSection, max_frame_rows=st.integers(1, 2048)),
    prefill=chunking,
    prefix_cache=st.builds(
        PrefixCacheSection,
        mode=st.sampled_from(["disabled", "record", "lookup-record"]),
        max_bytes=st.integers(0, 2**60),
        record_output=st.booleans(),
    ),
    limits=st.builds(LimitsSection, queue_timeout_s=seconds, drain_timeout_s=seconds),
    sampling=st.builds(SamplingSection, temperature=st.floats(0, 100), top_p=st.floats(0.001, 1)),
)


@given(settings)
def test_settings_survive_the_way_through_parameters(expected: OrchestratorSettings) -> None:
    parameters = to_parameters(expected)
    assert all(isinstance(value, str) for value in parameters.values())
    assert from_parameters(OrchestratorSettings, parameters) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speed": "1"}, "unknown field `speed`"),
        ({"stages": "[]"}, r"length >= 1 - at `\$\.stages`"),
        ({"stages": "skippy"}, r"`\$\.stages`"),
        ({"limits": '{"max_queue": -1}'}, r">= 0 - at `\$\.limits\.max_queue`"),
        ({"prefill": '{"schedule": "64,"}'}, r"schedule: got '' in '64,', expected .* - at `\$\.prefill`"),
        ({"prefill": '{"policy": "x"}'}, r"policy: got 'x', expected fixed.* - at `\$\.prefill`"),
        ({"prefix_cache": '{"mode": "exact"}'}, r"'exact' - at `\$\.prefix_cache\.mode`"),
        ({"scheduler": '{"speed": 1}'}, r"unknown field `speed` - at `\$\.scheduler`"),
        ({"context_tokens": "many"}, r"`\$\.context_tokens`"),
    ],
)
def test_wrong_parameters_are_refused_by_name(change: dict[str, str], message: str) -> None:
    parameters = to_parameters(OrchestratorSettings(model="123", stages=("a",)))
    with pytest.raises(SettingsError, match=f"settings of OrchestratorSettings: .*{message}"):
        from_parameters(OrchestratorSettings, {**parameters, **change})
    for key in ("model", "stages"):
        with pytest.raises(SettingsError, match=f"missing required field `{key}`"):
            from_parameters(OrchestratorSettings, {k: v for k, v in parameters.items() if k != key})


@pytest.mark.parametrize(
    ("toml", "refused"),
    [
        ('[speculation]\ndefault = "draft"', r"speculation\.plans\.draft: needs a draft model"),
        ("[speculation.plans.mine]\ndraft_model = true", r"speculation\.plans\.mine: needs a draft model"),
        ('[draft]\npath = "tiny"\nkv_tokens = 3', r"draft\.kv_tokens"),
    ],
)
def test_a_plan_with_a_draft_model_needs_one(toml: str, refused: str) -> None:
    with pytest.raises(SettingsError, match=refused):
        parse_deployment(toml)


def test_a_plan_with_a_draft_model_that_is_there() -> None:
    deployment = parse_deployment('[draft]\npath = "tiny"\n[speculation]\ndefault = "draft"')
    assert deployment.speculation.plan("draft").draft_model
