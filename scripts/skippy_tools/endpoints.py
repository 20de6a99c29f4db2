"""Where a server listens."""

from __future__ import annotations

import contextlib
import socket

import msgspec
from skippy_orchestrator.deployment import ServerSection
from skippy_stage.errors import SkippyError


class Endpoints(msgspec.Struct, frozen=True):
    """The address and the three ports of a server."""

    host: str
    http_port: int
    grpc_port: int
    metrics_port: int

    @property
    def _reachable(self) -> str:
        # A server that listens everywhere is reached from here like this.
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host

    @property
    def http_address(self) -> str:
        """Host and port of the HTTP endpoint."""
        return f"{self._reachable}:{self.http_port}"

    @property
    def http(self) -> str:
        """Base URL of the HTTP endpoint."""
        return f"http://{self.http_address}"

    @property
    def grpc(self) -> str:
        """Address of the gRPC endpoint."""
        return f"{self._reachable}:{self.grpc_port}"

    @property
    def metrics(self) -> str:
        """URL of the Prometheus metrics."""
        return f"http://{self._reachable}:{self.metrics_port}/metrics"


def choose_endpoints(section: ServerSection) -> Endpoints:
    """The ports of a deployment, free ones for zeros; raises SkippyError naming a port that is taken."""
    wanted = {"http": section.http_port, "grpc": section.grpc_port, "metrics": section.metrics_port}
    chosen = []
    # All are held until the last is known, so that two zeros never get the same port.
    with contextlib.ExitStack() as held:
        for kind, port in wanted.items():
            probe = held.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((section.host, port))
                probe.listen()
            except OSError as error:
                raise SkippyError(
                    f"{kind} port {port} on {section.host}: {error.strerror}; "
                    f"--{kind}-port 0 takes a free one"
                ) from None
            chosen.append(int(probe.getsockname()[1]))
    return Endpoints(section.host, *chosen)
