"""``./scripts/generate_docs``: docs/configuration.md, and the README's configuration table."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from skippy_tools.command import run_script
from skippy_tools.paths import ROOT, display
from skippy_tools.reference import page, refresh

CONFIGURATION = ROOT / "docs" / "configuration.md"
README = ROOT / "README.md"


def generate_docs(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 when a page is not as generated.")
    ] = False,
) -> None:
    """Write the configuration reference from the settings' own descriptions.

    docs/configuration.md is written whole; in README.md only what stands between the markers
    <!-- configuration:begin --> and <!-- configuration:end --> is replaced.
    """
    console = Console(stderr=True, highlight=False)
    wanted = {CONFIGURATION: page()}
    if README.is_file():
        wanted[README] = refresh(README.read_text(encoding="utf-8"))
    stale = [
        path
        for path, text in wanted.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
        console.print(f"{display(path)}: {'not as generated' if check else 'written'}")
    raise typer.Exit(1 if check and stale else 0)


def main() -> None:
    """Entry point of ./scripts/generate_docs."""
    run_script(generate_docs, "generate_docs")


if __name__ == "__main__":
    main()
