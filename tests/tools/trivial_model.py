"""The launcher tests' own orchestrator: answers ``status``, and does what its parameters say."""

import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """Ready ``ready_after_s`` seconds after it was loaded; busy for ``busy_s`` seconds from there."""

    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        read = {key: float(value["string_value"]) for key, value in parameters.items()}
        if read.get("fail_to_load"):
            raise ValueError("this model was told not to load")
        self.started = time.monotonic()
        self.ready_after_s = read.get("ready_after_s", 0.0)
        self.busy_s = read.get("busy_s", 0.0)
        self.drain = Path(os.environ["SKIPPY_RUN_DIR"]) / "drain"
        self.hang = threading.Event() if read.get("hang_at_exit") else None

    def execute(self, requests):
        age = time.monotonic() - self.started
        ready = age >= self.ready_after_s
        status = {
            "ready": ready and not self.drain.exists(),
            "reason": "",
            "draining": self.drain.exists(),
            "active": int(ready and age < self.ready_after_s + self.busy_s),
            "waiting": 0,
            "stages": [
                {"name": "trivial_stage_0", "ready": ready, "reason": "" if ready else "loading", "pid": 1}
            ],
        }
        for request in requests:
            text = np.array([[json.dumps(status).encode()]], dtype=np.object_)
            response = pb_utils.InferenceResponse([pb_utils.Tensor("status", text)])
            request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self):
        if self.hang is not None:
            self.hang.wait()
