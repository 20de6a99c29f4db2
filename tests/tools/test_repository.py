from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from google.protobuf import text_format
from skippy_orchestrator.deployment import Deployment, OrchestratorSettings, load_deployment, parse_deployment
from skippy_stage.settings import SettingsError, StageSettings, from_parameters
from skippy_tools.paths import DEFAULT_DEPLOYMENT, MODEL_REPOSITORY, ROOT, display
from skippy_tools.pbtxt import quote
from skippy_tools.repository import (
    ModelShape,
    differences,
    draft_settings,
    generate,
    generate_for,
    orchestrator_settings,
    read_shape,
    split_layers,
    stage_settings,
    write,
)
from tritonclient.grpc import model_config_pb2


def even(layers: int = 10) -> ModelShape:
    def balance(stages: int) -> list[tuple[int, int]]:
        edges = [layers * stage // stages for stage in range(stages + 1)]
        return list(itertools.pairwise(edges))

    return ModelShape(n_layers=layers, hidden_size=8, context_length=64, has_head=False, balance=balance)


def parse(text: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def parameters(text: str) -> dict[str, str]:
    return {key: value.string_value for key, value in parse(text).parameters.items()}


def test_the_committed_repository_is_the_generated_one() -> None:
    deployment = load_deployment(DEFAULT_DEPLOYMENT)
    files = generate_for(deployment, display(DEFAULT_DEPLOYMENT))
    assert not differences(files, MODEL_REPOSITORY), "run ./scripts/generate_repository"
    committed = {
        str(path.relative_to(MODEL_REPOSITORY)) for path in MODEL_REPOSITORY.rglob("*") if path.is_file()
    }
    assert committed == set(files)
    assert not any(str(ROOT) in text or str(Path.home()) in text for text in files.values())


def test_models_and_their_settings() -> None:
    deployment = parse_deployment('[pipeline]\nstages = 3\n[server]\nname = "llm"\naliases = ["other"]')
    shape = even()
    files = generate(deployment, shape, "x.toml")
    configs = {path.split("/")[0]: text for path, text in files.items() if path.endswith("config.pbtxt")}
    assert list(configs) == ["llm", "other", "llm_stage_0", "llm_stage_1", "llm_stage_2"]
    stages = stage_settings(deployment, shape)
    assert [(stage.first_layer, stage.last_layer) for stage in stages] == [(0, 3), (3, 6), (6, 10)]
    for stage in stages:
        assert from_parameters(StageSettings, parameters(configs[stage.name])) == stage
    orchestrator = from_parameters(OrchestratorSettings, parameters(configs["llm"]))
    assert orchestrator == orchestrator_settings(deployment, stages)
    assert parameters(configs["other"]) == {"alias_of": "llm", "max_requests": "320"}
    for name, text in configs.items():
        config = parse(text)
        assert config.name == name
        assert config.model_transaction_policy.decoupled
        assert config.backend == ("skippy_stage" if "stage" in name else "skippy_orchestrator")
        assert f"{name}/1/.gitkeep" in files


def test_hidden_rows_cross_between_stages_only() -> None:
    files = generate(parse_deployment("[pipeline]\nstages = 3"), even(), "x.toml")
    crossing = {}
    for index in range(3):
        config = parse(files[f"skippy_stage_{index}/config.pbtxt"])
        crossing[index] = (
            [list(tensor.dims) for tensor in config.input if tensor.name == "hidden"],
            [list(tensor.dims) for tensor in config.output if tensor.name == "hidden"],
        )
    assert crossing == {0: ([], [[-1, 8]]), 1: ([[-1, 8]], [[-1, 8]]), 2: ([[-1, 8]], [])}


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("", "f32"),
        ('[pipeline]\ndevice = "cuda"', "f16"),
        ('[pipeline]\ndevice = "cuda:1"\nweights = "f32"', "f32"),
        ('[[stages]]\ndevice = "cuda"\n[[stages]]', "f32"),
        ('[pipeline]\nlink_dtype = "bf16"', "bf16"),
    ],
)
def test_link_dtype_is_one_for_the_pipeline(toml: str, expected: str) -> None:
    assert {stage.link_dtype for stage in stage_settings(parse_deployment(toml), even())} == {expected}


def test_stages_inherit_from_the_pipeline() -> None:
    toml = '[pipeline]\nthreads = 4\n[[stages]]\nthreads = 0\n[[stages]]\nweights = "int8"'
    first, second = stage_settings(parse_deployment(toml), even())
    assert (first.threads, first.weights) == (0, "f16")
    assert (second.threads, second.weights) == (4, "int8")


@pytest.mark.parametrize(
    ("toml", "expected"),
    [
        ("", ("auto", 64, 0, 64 << 20)),
        ('mode = "record"\npayload = "full-state"', ("full-state", 64, 0, 0)),
        ('mode = "disabled"\npayload = "resident-kv"', ("off", 64, 0, 0)),
        ("max_entries = 5\nmax_bytes = 6\nactivation_bytes = 7", ("auto", 5, 6, 7)),
    ],
)
def test_stages_are_told_what_to_keep(toml: str, expected: tuple[str, int, int, int]) -> None:
    told = {
        (s.prefix_payload, s.prefix_max_entries, s.prefix_max_bytes, s.activation_bytes)
        for s in stage_settings(parse_deployment(f"[prefix_cache]\n{toml}"), even())
    }
    assert told == {expected}


def stages(*layers: tuple[int, int] | None) -> Deployment:
    listed = "".join(f"[[stages]]\n{f'layers = {list(pair)}' if pair else ''}\n" for pair in layers)
    return parse_deployment(listed)


def test_listed_layers_are_taken() -> None:
    assert split_layers(stages((0, 7), (7, 10)), even()) == ((0, 7), (7, 10))


@pytest.mark.parametrize(
    ("deployment", "message"),
    [
        (stages((0, 4), (5, 10)), "stages[1].layers: starts at layer 5, expected 4"),
        (stages((0, 4), (3, 10)), "stages[1].layers: starts at layer 3, expected 4"),
        (stages((1, 4), (4, 10)), "stages[0].layers: starts at layer 1, expected 0"),
        (stages((0, 0), (0, 10)), "stages[0].layers: [0, 0) holds no layer"),
        (stages((0, 4), (4, 9)), "stages[1].layers: ends at layer 9, the model has 10"),
        (stages((0, 4), (4, 11)), "stages[1].layers: ends at layer 11, the model has 10"),
        (stages((0, 4), None), "stages[1].layers: missing"),
        (parse_deployment("[pipeline]\nstages = 11"), "pipeline.stages: 11 stages, the model has 10 layers"),
    ],
)
def test_a_wrong_split_is_named(deployment: Deployment, message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        split_layers(deployment, even())
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('[server]\naliases = ["a", "a"]', "a is the name of two models"),
        ('[server]\naliases = ["skippy"]', "skippy is the name of two models"),
        ('[server]\naliases = ["skippy_stage_1"]', "skippy_stage_1 is the name of two models"),
        ("[model]\ncontext_tokens = 65", "65"),
    ],
)
def test_what_cannot_be_served_is_named(toml: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        generate(parse_deployment(toml), even(), "x.toml")


def test_writing_again_leaves_nothing_over(tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.pbtxt").write_text('name: "foreign"\n')
    three = generate(parse_deployment("[pipeline]\nstages = 3"), even(), "x.toml")
    two = generate(parse_deployment(""), even(), "x.toml")
    write(three, tmp_path)
    assert not differences(three, tmp_path)
    assert "skippy_stage_2: left over" in differences(two, tmp_path)
    write(two, tmp_path)
    assert not differences(two, tmp_path)
    assert not (tmp_path / "skippy_stage_2").exists()
    assert (tmp_path / "foreign").exists(), "a model of somebody else stays"
    (tmp_path / "skippy" / "config.pbtxt").write_text("changed")
    (tmp_path / "ensemble" / "config.pbtxt").unlink()
    assert differences(two, tmp_path) == ["skippy/config.pbtxt: differs", "ensemble/config.pbtxt: missing"]


def test_quoting_survives_triton_s_parser() -> None:
    text = 'a "b" \\ c\nd\te é 世'
    config = model_config_pb2.ModelConfig()
    text_format.Parse(f"name: {quote(text)}", config)
    assert config.name == text


def test_real_model_is_balanced() -> None:
    shape = read_shape(Deployment().model.path)
    for count in (1, 2, 3, 5):
        pipeline = msgspec.structs.replace(Deployment().pipeline, stages=count)
        ranges = split_layers(msgspec.structs.replace(Deployment(), pipeline=pipeline), shape)
        assert len(ranges) == count
        assert ranges[0][0] == 0
        assert ranges[-1][1] == shape.n_layers


def test_a_draft_model_is_a_stage_of_its_own() -> None:
    toml = """
    [draft]
    path = "tiny"
    threads = 1
    kv_tokens = 64
    ahead = false
    [pipeline]
    engine = "some.module:engine"
    [prefix_cache]
    mode = "record"
    """
    deployment = parse_deployment(toml)
    files = generate(deployment, even(), "x.toml", even(4))
    told = from_parameters(StageSettings, parameters(files["skippy_draft/config.pbtxt"]))
    assert told == draft_settings(deployment, even(4))
    assert (told.first_layer, told.last_layer, told.model, told.kv_tokens) == (0, 4, "tiny", 64)
    assert (told.prefix_payload, told.engine, told.threads) == ("off", "some.module:engine", 1)
    orchestrator = from_parameters(OrchestratorSettings, parameters(files["skippy/config.pbtxt"]))
    assert (orchestrator.draft_stage, orchestrator.draft_model) == ("skippy_draft", "tiny")
    assert not orchestrator.draft_ahead
    assert "skippy_draft" not in orchestrator.stages


def test_a_head_is_told_to_the_last_stage() -> None:
    toml = '[model]\nmtp_head = "heads/mine.safetensors"\n[speculation]\ndefault = "mtp"'
    deployment = parse_deployment(toml)
    told = [stage.mtp_head for stage in stage_settings(deployment, even())]
    assert told == ["", "heads/mine.safetensors"]
    files = generate(deployment, even(), "x.toml")
    assert from_parameters(OrchestratorSettings, parameters(files["skippy/config.pbtxt"])).mtp_head


def test_a_plan_with_a_head_needs_one() -> None:
    deployment = parse_deployment('[speculation]\ndefault = "composite"')
    with pytest.raises(SettingsError, match=r"x\.toml: speculation\.plans\.composite: needs .*mtp_head"):
        generate(deployment, even(), "x.toml")
    assert generate(deployment, with_head(even()), "x.toml")


def with_head(shape: ModelShape) -> ModelShape:
    return replace(shape, has_head=True)
