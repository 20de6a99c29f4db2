"""A stage that fails or dies: errors name it, nothing is lost or leaked, and the server serves again."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from skippy_client import GenerationCancelled, ServerFault, ServerUnavailable, SkippyClient, SkippyError
from skippy_tools.server import ServerProcess

from tests.triton.support import client_of, generate_all, raw_stream, tensor, wait_until
from tests.triton_server import deployment, running

pytestmark = pytest.mark.triton

PROMPT = "Once upon a time"
DEADLINE_S = 3.0
TOML = f"""
[pipeline]
engine = "tests.triton.faulty:create"
[limits]
frame_deadline_s = {DEADLINE_S}
[kv]
tokens = 16384
"""


class Faults:
    """What the stages of a server shall do wrong (faulty.py)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, stage: str, order: str) -> None:
        (self._folder / stage).write_text(order)

    def clear(self) -> None:
        for file in self._folder.iterdir():
            file.unlink()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    # Stages find tests.triton.faulty in the folder that the tests run in.
    with running(deployment(TOML), environment={"SKIPPY_TEST_FAULTS": str(folder)}) as server:
        yield server


@pytest.fixture
def faults(folder: Path) -> Iterator[Faults]:
    faults = Faults(folder)
    yield faults
    faults.clear()


@pytest.fixture
def client(server: ServerProcess, faults: Faults) -> Iterator[SkippyClient]:
    with client_of(server) as client:
        client.wait_ready(60)
        yield client
        faults.clear()
        client.wait_ready(60)


@pytest.mark.parametrize("stage", ["skippy_stage_0", "skippy_stage_1"])
def test_d06_a_fault_in_mid_stream_ends_that_request_alone(
    server: ServerProcess, client: SkippyClient, faults: Faults, stage: str
) -> None:
    prompt = client.generate(PROMPT, max_tokens=1).num_input_tokens
    faults.set(stage, f"raise at {prompt + 3}")
    inputs = [
        tensor("text_input", "BYTES", [PROMPT.encode()]),
        tensor("max_tokens", "INT32", [20]),
        tensor("stream", "BOOL", [True]),
        tensor("ignore_eos", "BOOL", [True]),
    ]
    result = raw_stream(server, {"a": inputs})
    (error,) = result.errors
    assert f"INTERNAL: {stage}: " in error
    assert "injected" in error
    assert "Traceback" not in error
    got = [r for r in result.responses if r.as_numpy("output_ids") is not None]
    assert 0 < sum(r.as_numpy("output_ids").size for r in got) <= 4
    faults.clear()
    assert client.generate(PROMPT, max_tokens=20, ignore_eos=True).num_output_tokens == 20


def test_a_fault_of_one_leaves_the_others_of_its_batch_alone(client: SkippyClient, faults: Faults) -> None:
    longer = {"prompt": PROMPT + " there was a very old king", "max_tokens": 30, "ignore_eos": True}
    alone = client.generate(**longer)  # type: ignore[arg-type]
    prompt = client.generate(PROMPT, max_tokens=1).num_input_tokens
    faults.set("skippy_stage_0", f"raise at {prompt + 3} only {prompt}")
    results = generate_all(client, [longer, {"prompt": PROMPT, "max_tokens": 30}, longer])
    assert [type(r).__name__ for r in results] == ["Generation", "ServerFault", "Generation"]
    assert results[0].text == results[2].text == alone.text  # type: ignore[union-attr]


def test_a_stage_that_hangs_ends_its_sessions_at_the_deadline(client: SkippyClient, faults: Faults) -> None:
    faults.set("skippy_stage_1", "hang")
    started = time.monotonic()
    with pytest.raises(ServerFault, match=r"^skippy_stage_1: no answer within 3 s"):
        client.generate(PROMPT, max_tokens=20, timeout=30)
    assert time.monotonic() - started >= DEADLINE_S
    with pytest.raises(ServerUnavailable):
        client.generate(PROMPT, max_tokens=20)
    faults.clear()
    client.wait_ready(30)
    assert client.generate(PROMPT, max_tokens=5).num_output_tokens == 5


def kill_in_mid_stream(server: ServerProcess, client: SkippyClient, stage: str, streams: int) -> list[str]:
    running = [client.stream(f"{i} {PROMPT}", max_tokens=1000, ignore_eos=True) for i in range(streams)]
    for stream in running:
        next(stream)
        next(stream)
    os.kill(server.stub_pids[stage], signal.SIGKILL)
    errors = []
    for stream in running:
        with pytest.raises(ServerFault) as caught:
            stream.result()
        errors.append(str(caught.value))
    return errors


@pytest.mark.parametrize("stage", ["skippy_stage_0", "skippy_stage_1"])
def test_kill_9_of_a_stage_in_mid_stream(server: ServerProcess, client: SkippyClient, stage: str) -> None:
    before = server.stub_pids
    expected = client.generate(PROMPT, max_tokens=10).text
    started = time.monotonic()
    errors = kill_in_mid_stream(server, client, stage, 6)
    assert time.monotonic() - started < 30
    assert all(error.startswith(f"{stage}: ") for error in errors), errors
    with pytest.raises(ServerUnavailable, match=stage):
        client.generate(PROMPT, max_tokens=10)
    assert not client.status().ready
    client.wait_ready(60)
    assert client.generate(PROMPT, max_tokens=10).text == expected
    after = server.stub_pids
    assert after[stage] != before[stage]
    assert {name: pid for name, pid in after.items() if name != stage} == {
        name: pid for name, pid in before.items() if name != stage
    }


def test_kill_9_of_an_idle_stage_and_of_both(server: ServerProcess, client: SkippyClient) -> None:
    for stages in (["skippy_stage_1"], ["skippy_stage_0", "skippy_stage_1"]):
        for stage in stages:
            os.kill(server.stub_pids[stage], signal.SIGKILL)
        wait_until(lambda: not client.status().ready, 10, "the loss is noticed")
        client.wait_ready(60)
        assert client.generate(PROMPT, max_tokens=5).num_output_tokens == 5


def test_kills_under_load_never_take_the_server_down() -> None:
    """16 clients, by two names, a fifth of them cancelling; each stage dies in turn, and serving goes on."""
    finished, over, wrong = [0], threading.Event(), []

    def work(server: ServerProcess, index: int) -> None:
        chance = random.Random(index)
        name = ("skippy", "ensemble")[index % 2]
        with SkippyClient(server.endpoints.grpc, model=name, timeout=60) as mine:
            while not over.is_set():
                try:
                    stream = mine.stream(f"{index} ships went", max_tokens=40, ignore_eos=True)
                    if chance.random() < 0.2:
                        time.sleep(chance.random() / 2)
                        stream.cancel()
                    stream.result()
                    finished[0] += 1
                except (ServerFault, ServerUnavailable, GenerationCancelled):
                    time.sleep(0.1)
                except SkippyError as error:
                    wrong.append(error)

    with running(deployment("[kv]\ntokens = 8192")) as server, client_of(server) as client:
        threads = [threading.Thread(target=work, args=(server, i)) for i in range(16)]
        for thread in threads:
            thread.start()
        try:
            for stage in ("skippy_stage_0", "skippy_stage_1", "skippy_stage_0"):
                before = finished[0]
                wait_until(lambda n=before: finished[0] > n + 16, 60, "streams finish")  # type: ignore[misc]
                os.kill(server.stub_pids[stage], signal.SIGKILL)
                wait_until(lambda: not client.status().ready, 20, "the loss is noticed")
                client.wait_ready(60)
            before = finished[0]
            wait_until(lambda: finished[0] > before + 16, 60, "streams finish again")
        finally:
            over.set()
            for thread in threads:
                thread.join()
        assert wrong == []
        assert server.running


def test_the_server_stops_cleanly_after_a_kill() -> None:
    with (
        running(deployment("[kv]\ntokens = 4096\n[server]\naliases = []")) as server,
        client_of(server) as client,
    ):
        kill_in_mid_stream(server, client, "skippy_stage_1", 2)
        client.wait_ready(60)
        assert client.generate(PROMPT, max_tokens=5).num_output_tokens == 5
