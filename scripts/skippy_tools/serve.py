"""``./scripts/serve``: a deployment in the foreground."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from skippy_orchestrator.deployment import Deployment, ServerSection, load_deployment
from skippy_stage.errors import SkippyError

from skippy_tools.command import run_script
from skippy_tools.paths import DEFAULT_DEPLOYMENT, display
from skippy_tools.server import ServerError, ServerProcess, StoppedError

console = Console(stderr=True, highlight=False)


class Stops:
    """Counts SIGINT and SIGTERM: the first asks for a gentle stop, the second for a quick one."""

    def __init__(self) -> None:
        self.count = 0
        self._event = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self._event.set()

    def wait(self, seconds: float) -> None:
        """Sleep until a signal has come, at most so long."""
        self._event.wait(seconds)

    def asked(self) -> bool:
        """True once a stop was asked for."""
        return self.count > 0

    def urgent(self) -> bool:
        """True once it was asked for again."""
        return self.count > 1


def with_overrides(
    deployment: Deployment,
    *,
    stages: int | None = None,
    http_port: int | None = None,
    grpc_port: int | None = None,
    metrics_port: int | None = None,
) -> Deployment:
    """A deployment with what was typed on the command line; a stage count drops listed [[stages]]."""
    ports = {"http_port": http_port, "grpc_port": grpc_port, "metrics_port": metrics_port}
    given = {name: port for name, port in ports.items() if port is not None}
    # Through convert, so that ranges are checked as in a file; replace() checks nothing.
    server = msgspec.convert({**msgspec.to_builtins(deployment.server), **given}, ServerSection)
    deployment = msgspec.structs.replace(deployment, server=server)
    if stages is not None:
        pipeline = msgspec.structs.replace(deployment.pipeline, stages=stages)
        deployment = msgspec.structs.replace(deployment, pipeline=pipeline, stages=())
    return deployment


def start_visibly(server: ServerProcess, stops: Stops) -> None:
    """Start a server and wait until it is ready, showing what is being waited for."""
    started = time.monotonic()
    last = ""

    with console.status("starting") as line:

        def show(text: str) -> None:
            nonlocal last
            line.update(f"{text} [dim]({time.monotonic() - started:.0f} s)[/dim]")
            if text != last and not console.is_terminal:
                console.print(f"waiting: {text}", markup=False)
            last = text

        server.start()
        server.wait_ready(progress=show, interrupted=stops.asked)
    console.print(f"[green]ready[/green] after {time.monotonic() - started:.1f} s")


def print_endpoints(server: ServerProcess) -> None:
    """Show where the server listens, and what of it was started."""
    endpoints, used = server.endpoints, server.tritonserver
    table = Table.grid(padding=(0, 2))
    table.add_row("HTTP", f"{endpoints.http}/v2/models/{server.model_name}/generate_stream")
    table.add_row("gRPC", endpoints.grpc)
    table.add_row("metrics", endpoints.metrics)
    if used is not None:
        table.add_row("server", f"tritonserver {used.version or ''} ({used.origin}), log {server.log_path}")
    console.print(table, soft_wrap=True)


def fail(error: SkippyError) -> None:
    """Show an error and the end of the server's log, and exit with status 1."""
    if isinstance(error, ServerError) and error.log:
        console.print(error.log, style="dim", markup=False, soft_wrap=True)
    console.print(f"error: {error.message}", style="red", markup=False, soft_wrap=True)
    raise typer.Exit(1)


def follow(path: Path, finished: threading.Event) -> None:
    """Copy a growing log to standard error until told to finish."""
    with path.open(encoding="utf-8", errors="replace") as log:
        while not finished.is_set():
            sys.stderr.write(log.read())
            sys.stderr.flush()
            finished.wait(0.2)
        sys.stderr.write(log.read())


def serve(
    deployment: Annotated[
        Path,
        typer.Argument(help="Deployment file (TOML); docs/configuration.md lists its keys.", dir_okay=False),
    ] = DEFAULT_DEPLOYMENT,
    stages: Annotated[
        int | None, typer.Option(min=1, help="Cut the model into this many stages, balanced by bytes.")
    ] = None,
    http_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="HTTP port; 0 takes a free one.")
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="gRPC port; 0 takes a free one.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Metrics port; 0 takes a free one.")
    ] = None,
    model_repository: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Serve this repository instead of a generated one."),
    ] = None,
    ready_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds until all stages must be ready.")
    ] = 180.0,
    log: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Keep the server's log in this file.")
    ] = None,
    json_endpoints: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False, help="Write host and ports as JSON to this file when the server is ready."
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the server's log.")] = False,
) -> None:
    """Run a Triton server for a deployment in the foreground.

    Takes the tritonserver of the system (an NGC image) when there is one, and the one of the
    nvidia-pytriton package otherwise; SKIPPY_TRITONSERVER=wheel, or a path, decides. Ctrl-C or SIGTERM
    lets running requests finish within limits.drain_timeout_s; a second one ends them. Nothing is left
    behind: no process, no shared memory.

    Examples:

      ./scripts/serve

      ./scripts/serve --stages 3 --http-port 0 --grpc-port 0 --metrics-port 0

      ./scripts/serve deployments/smollm2-two-stages.toml --log server.log
    """
    stops = Stops()
    finished = threading.Event()
    server = None
    try:
        chosen = with_overrides(
            load_deployment(deployment),
            stages=stages,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
        )
        server = ServerProcess(
            chosen,
            source=display(deployment),
            model_repository=model_repository,
            log=log,
            ready_timeout_s=ready_timeout,
        )
        run(server, stops, json_endpoints, finished, verbose=verbose)
    except StoppedError:
        pass
    except msgspec.ValidationError as error:
        fail(SkippyError(str(error)))
    except SkippyError as error:
        fail(error)
    finally:
        finished.set()
        if server is not None:
            server.stop()


def run(
    server: ServerProcess,
    stops: Stops,
    json_endpoints: Path | None,
    finished: threading.Event,
    *,
    verbose: bool,
) -> None:
    """Start, wait for a signal or the server's end, and stop."""
    if verbose:
        server.start()
        threading.Thread(target=follow, args=(server.log_path, finished), daemon=True).start()
        server.wait_ready(interrupted=stops.asked)
    else:
        start_visibly(server, stops)
    print_endpoints(server)
    if json_endpoints is not None:
        try:
            json_endpoints.write_bytes(msgspec.json.encode(server.endpoints))
        except OSError as error:
            raise SkippyError(f"{json_endpoints}: {error.strerror}") from None
    while server.running and not stops.asked():
        stops.wait(2.0)
        # Calls to a dead stub never return, so its clients are told by the server's end.
        if server.running and not stops.asked() and (lost := server.lost):
            raise ServerError(f"{', '.join(lost)}: the process has ended", server.log_excerpt())
    if not server.running:
        raise ServerError(f"tritonserver ended with status {server.returncode}", server.log_excerpt())
    console.print("stopping: running requests may finish; again to end them")
    server.stop(drain=True, interrupted=stops.urgent)
    console.print("stopped")


def main() -> None:
    """Entry point of ./scripts/serve."""
    run_script(serve, "serve")


if __name__ == "__main__":
    main()
