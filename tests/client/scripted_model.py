"""A Triton model with the orchestrator's tensors that does what its prompt says, without a language model.

The prompt is JSON, see ``Script``; any other text is answered by a few tokens. Runs inside tritonserver's
Python backend, not inside pytest.
"""

import collections
import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = 1  # TRITONSERVER_RESPONSE_COMPLETE_FINAL


class Script:
    """tokens: how many to stream; delay_s: before each; error: [code, message] after them, instead of an end;
    hang: say nothing until cancelled; finals: how many last responses; echo: the inputs as text;
    omit: outputs left out; gate: wait before every token but the first until a request with opens of that
    name has come; together: [name, n], wait until n of that name run; text: of the tokens; cache: the
    record of the prefix cache that comes with last responses, none by default; drafts: [total, accepted],
    which come with last responses too."""

    def __init__(self, text):
        plan = json.loads(text) if text.startswith("{") else {}
        self.tokens = plan.get("tokens", 3)
        self.delay_s = plan.get("delay_s", 0.0)
        self.error = plan.get("error")
        self.hang = plan.get("hang", False)
        self.finals = plan.get("finals", 1)
        self.echo = plan.get("echo", False)
        self.omit = plan.get("omit", [])
        self.gate = plan.get("gate")
        self.opens = plan.get("opens")
        self.together = plan.get("together", ["", 0])
        self.text = plan.get("text")
        self.cache = plan.get("cache")
        self.drafts = plan.get("drafts")


class TritonPythonModel:
    def initialize(self, args):
        self.lock = threading.Lock()
        self.active = 0
        self.cancelled = []
        self.open_gates = set()
        self.arrived = collections.Counter()

    def execute(self, requests):
        for request in requests:
            inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            sender = request.get_response_sender()
            if "status" in inputs:
                sender.send(pb_utils.InferenceResponse([self.status()]), flags=FINAL)
                continue
            threading.Thread(target=self.run, args=(request.request_id(), inputs, sender)).start()

    def status(self):
        with self.lock:
            report = {
                "ready": True,
                "reason": "",
                "model": "scripted",
                "active": self.active,
                "waiting": 0,
                "stages": [
                    {
                        "name": "stage_0",
                        "ready": True,
                        "reason": "",
                        "novelty": 1,
                        "prefix": {"payload": "resident-kv", "blocks": 12, "lookups": 4, "hits": 3},
                    }
                ],
                "counters": {
                    "prefix_queries": 4,
                    "prefix_hits": 3,
                    "cached_tokens": 90,
                    "prompt_tokens": 200,
                },
                "cancelled": self.cancelled,
            }
        return pb_utils.Tensor("status", np.array([[json.dumps(report).encode()]], dtype=np.object_))

    def run(self, request_id, inputs, sender):
        with self.lock:
            self.active += 1
        try:
            self.play(request_id, inputs, sender)
        except Exception as error:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(repr(error))), flags=FINAL)
        finally:
            with self.lock:
                self.active -= 1

    def play(self, request_id, inputs, sender):
        script = Script(plan_of(inputs))
        tokens = int(inputs["max_tokens"].ravel()[0]) if "max_tokens" in inputs else script.tokens
        if script.opens:
            self.open_gates.add(script.opens)
        name, expected = script.together
        with self.lock:
            self.arrived[name] += 1
        if not self.wait_for(lambda: self.arrived[name] >= expected, request_id, sender):
            return
        for index in range(tokens):
            if not self.wait(script.delay_s, request_id, sender):
                return
            closed = script.gate and index
            if closed and not self.wait_for(lambda: script.gate in self.open_gates, request_id, sender):
                return
            last = index == tokens - 1 and script.error is None and not script.hang
            shown = json.dumps(describe(inputs)) if script.echo else script.text or f"t{index} "
            flags = FINAL if last and script.finals == 1 else 0
            reason = "length" if last and script.finals else ""
            sender.send(
                response(shown if index == 0 or not script.echo else "", [index], reason, script), flags
            )
        if script.hang and not self.wait_for(lambda: False, request_id, sender):
            return
        if script.error is not None:
            code, message = script.error
            error = pb_utils.TritonError(f"{code}: {message}", getattr(pb_utils.TritonError, code))
            sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
        elif script.finals == 0:
            sender.send(flags=FINAL)
        elif script.finals == 2:
            sender.send(response("again", [0], "length", script), flags=FINAL)

    def wait(self, seconds, request_id, sender):
        """False when the client cancelled, which also ends the request."""
        deadline = time.monotonic() + seconds
        while True:
            if sender.is_cancelled():
                with self.lock:
                    self.cancelled.append(request_id)
                error = pb_utils.TritonError("cancelled", pb_utils.TritonError.CANCELLED)
                sender.send(pb_utils.InferenceResponse(error=error), flags=FINAL)
                return False
            left = deadline - time.monotonic()
            if left <= 0:
                return True
            time.sleep(min(left, 0.02))

    def wait_for(self, condition, request_id, sender):
        """Wait for a condition; False when the client cancelled before, which also ends the request."""
        while not condition():
            if not self.wait(0.02, request_id, sender):
                return False
        return True


def plan_of(inputs):
    """The script in the prompt or in the newest message; without one, inputs that are no text are echoed."""
    if "text_input" in inputs:
        return inputs["text_input"].ravel()[0].decode()
    newest = json.loads(inputs["messages"].ravel()[0])[-1]["content"] if "messages" in inputs else ""
    return newest if newest.startswith("{") else '{"echo": true}'


def describe(inputs):
    """The inputs as JSON: name -> [dtype, shape, values]."""

    def plain(value):
        return value.decode() if isinstance(value, bytes) else value

    return {
        name: [str(value.dtype), list(value.shape), [plain(item) for item in value.ravel().tolist()]]
        for name, value in inputs.items()
    }


def response(text, ids, reason, script):
    outputs = {
        "text_output": np.array([[text.encode()]], dtype=np.object_),
        "output_ids": np.array([ids], dtype=np.int32),
        "finish_reason": np.array([[reason.encode()]], dtype=np.object_),
        "num_input_tokens": np.array([[7]], dtype=np.int32),
        "num_output_tokens": np.array([[len(ids)]], dtype=np.int32),
        "seed": np.array([[2**64 - 1]], dtype=np.uint64),
    }
    if reason and script.cache is not None:
        cached = script.cache["cached_prompt_tokens"]
        outputs["cached_tokens"] = np.array([[cached]], dtype=np.int32)
        outputs["cache_stats"] = np.array([[json.dumps(script.cache).encode()]], dtype=np.object_)
    if reason and script.drafts is not None:
        total, accepted = script.drafts
        outputs["total_draft_tokens"] = np.array([[total]], dtype=np.int32)
        outputs["total_accepted_draft_tokens"] = np.array([[accepted]], dtype=np.int32)
    return pb_utils.InferenceResponse(
        [pb_utils.Tensor(name, value) for name, value in outputs.items() if name not in script.omit]
    )
