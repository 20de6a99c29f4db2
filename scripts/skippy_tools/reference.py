"""The configuration reference: made from the deployment's structs, so it cannot fall behind them."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta
from skippy_orchestrator.deployment import Deployment, SpeculationPlan, SpeculationSection, StageSection
from skippy_orchestrator.pipeline.repository import ADDRESS_VARIABLE, KEY_VARIABLE
from skippy_stage.prefix.kill_switch import KILL_SWITCHES, OFF_FORMS

from skippy_tools.triton import CHOICE, OLDEST, OLDEST_RELEASE

ENVIRONMENT: Final = {
    "SKIPPY_MODELS": "Folder that relative model paths start at; ~/.cache/skippy/models when unset.",
    CHOICE: "Which tritonserver: `wheel` (of the nvidia-pytriton package), or a path. When unset, the "
    "system's (on PATH or in /opt/tritonserver) if there is one, otherwise the wheel's. "
    f"The oldest supported one is {OLDEST} (release {OLDEST_RELEASE}).",
    "SKIPPY_PYTHON": "A Python environment of your own for all scripts, used as it is: no .venv is made and "
    "nothing is installed. The way inside an NGC image, which brings its own torch.",
    **dict.fromkeys(
        KILL_SWITCHES,
        f"One of {', '.join(f'`{form}`' for form in OFF_FORMS)} turns the prefix cache off, whatever the "
        "deployment says.",
    ),
    "SKIPPY_RUN_DIR": "Set by serve for the models: the run directory. A file named `drain` in it makes the "
    "orchestrator refuse new requests.",
    ADDRESS_VARIABLE: "Set by serve for the models: host and port of the server's HTTP endpoint, where the "
    "orchestrator has a stage loaded again whose process has ended.",
    KEY_VARIABLE: "Set by serve for the models: what the server wants to see before it loads or unloads anything.",
}
"""Environment variables of the scripts and the server."""

BEGIN: Final = "<!-- configuration:begin -->"
END: Final = "<!-- configuration:end -->"


@dataclass(frozen=True)
class Key:
    """One key of a deployment file."""

    name: str
    kind: str
    default: str
    limits: str
    doc: str


def sections() -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """The tables of a deployment file, in order: heading and struct."""
    for field in msgspec.structs.fields(Deployment):
        if field.name == "stages":
            yield "[[stages]]", StageSection
        elif field.name == "speculation":
            yield "[speculation]", SpeculationSection
            yield from _plan_sections()
        else:
            yield f"[{field.name}]", field.type


def _plan_sections() -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """A speculation plan's own tables."""
    plan = "speculation.plans.NAME"
    yield f"[{plan}]", SpeculationPlan
    for field in msgspec.structs.fields(SpeculationPlan):
        for struct in _structs(_unwrap(field.type)[0]):
            yield f"[{plan}.{field.name}]", struct


def _structs(annotation: Any) -> Iterator[type[msgspec.Struct]]:
    for each in (annotation, *get_args(annotation)):
        if isinstance(each, type) and issubclass(each, msgspec.Struct):
            yield each


def keys(section: type[msgspec.Struct]) -> list[Key]:
    """The keys of one table; a field without a description is a mistake in the struct."""
    found = []
    for field in msgspec.structs.fields(section):
        annotation, meta = _unwrap(field.type)
        if not meta.description:
            raise ValueError(f"{section.__name__}.{field.name} has no description")
        found.append(Key(field.name, _kind(annotation), _default(field), _limits(meta), meta.description))
    return found


def _unwrap(annotation: Any) -> tuple[Any, Meta]:
    metas = [extra for extra in getattr(annotation, "__metadata__", ()) if isinstance(extra, Meta)]
    return (get_args(annotation)[0] if metas else annotation), (metas[0] if metas else Meta())


def _kind(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is dict or any(_structs(annotation)):
        return "table"
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in args)
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(arg) for arg in args if arg is not types.NoneType)
    if origin is tuple:
        return f"list of {_kind(args[0])}" if args[-1] is Ellipsis else f"[{', '.join(map(_kind, args))}]"
    names = {str: "string", int: "integer", float: "number", bool: "true or false"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is None:
        return ""
    if isinstance(field.default, msgspec.Struct):
        return ""
    if field.default is msgspec.NODEFAULT:
        return "required" if field.default_factory is msgspec.NODEFAULT else ""
    return f"`{msgspec.json.encode(field.default).decode()}`"


def _limits(meta: Meta) -> str:
    if meta.ge is not None and meta.le is not None:
        return f"{meta.ge:,} to {meta.le:,}"
    named = {"at least": meta.ge, "above": meta.gt, "at most": meta.le, "below": meta.lt}
    return ", ".join(f"{word} {value:,}" for word, value in named.items() if value is not None)


def tables(heading: str) -> str:
    """All tables as Markdown, one per section under headings of the given level."""
    parts = []
    for name, section in sections():
        parts.append(f"{heading} `{name}`\n\n{inspect.getdoc(section)}\n")
        rows = ["| key | type | default | range | what it does |", "|---|---|---|---|---|"]
        for key in keys(section):
            cells = (f"`{key.name}`", key.kind, key.default, key.limits, key.doc)
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def environment() -> str:
    """The environment variables as Markdown."""
    rows = [f"| `{name}` | {doc} |" for name, doc in ENVIRONMENT.items()]
    return "\n".join(["## Environment variables\n", "| variable | what it does |", "|---|---|", *rows]) + "\n"


def page() -> str:
    """The text of docs/configuration.md."""
    return (
        "# Configuration\n\n"
        "Generated by `./scripts/generate_docs` from `backends/skippy_orchestrator/deployment/`: "
        "change them there, not here.\n\n"
        "A deployment is one TOML file. Every key has a default: an empty file is a deployment. "
        "Unknown keys and values out of range are refused by name. `./scripts/serve FILE` runs it, and "
        "`./scripts/generate_repository FILE` writes its Triton model repository.\n\n"
        f"{tables('##')}\n{environment()}"
    )


def refresh(text: str) -> str:
    """A document with the tables between its markers replaced; one without markers stays as it is."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin:
        return text
    if not end:
        raise ValueError(f"{BEGIN} without {END}")
    return f"{before}{BEGIN}\n\n{tables('###')}\n{END}{after}"
