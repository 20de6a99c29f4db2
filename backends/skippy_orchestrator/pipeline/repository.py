"""Loading a stage's model again, through the server's own repository API.

Triton's Python backend does not restart a stub that has died: every call to it fails, or hangs when the stub
had already taken it, while server and model still say that they are ready. Unloading and loading the model
gives it a new stub; the old version stays in the background until its last call ends, which may be never.
It works only when the server runs with ``--model-control-mode=explicit``, as ``serve`` starts it, and over
HTTP: the same calls from inside a model block it, and can end the whole server when they fail (2.51.0).
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Mapping
from typing import Final

from skippy_stage.errors import StageFault

ADDRESS_VARIABLE: Final = "SKIPPY_REPOSITORY_API"
"""host:port of the server's HTTP endpoint."""
KEY_VARIABLE: Final = "SKIPPY_REPOSITORY_KEY"
"""What the server wants to see in KEY_HEADER before it loads or unloads anything."""
KEY_HEADER: Final = "skippy-repository-key"

_UNLOAD_TIMEOUT_S: Final = 5.0
_LOAD_TIMEOUT_S: Final = 600.0


class ModelRepository:
    """The repository API of the server that this process belongs to."""

    def __init__(self, address: str, key: str = "") -> None:
        self._address = address
        self._headers = {"Connection": "close", **({KEY_HEADER: key} if key else {})}

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> ModelRepository | None:
        """The API as the launcher announces it, or None."""
        address = environment.get(ADDRESS_VARIABLE)
        return cls(address, environment.get(KEY_VARIABLE, "")) if address else None

    def reload(self, model: str) -> None:
        """Unload and load a model; returns when it is loaded, raises StageFault when it couldn't be."""
        self._post(model, "unload", _UNLOAD_TIMEOUT_S)
        self._post(model, "load", _LOAD_TIMEOUT_S)

    def _post(self, model: str, action: str, timeout_s: float) -> None:
        # A new connection each time: an idle one would hold up the server's exit.
        connection = http.client.HTTPConnection(self._address, timeout=timeout_s)
        try:
            connection.request("POST", f"/v2/repository/models/{model}/{action}", b"{}", self._headers)
            answer = connection.getresponse()
            body = answer.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise StageFault(model, f"{action} failed: {error}") from None
        finally:
            connection.close()
        if answer.status != 200:
            raise StageFault(model, f"{action} was refused: {_reason(body)}")


def _reason(body: str) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body or "no reason given"
