"""D-07, D-08, D-09, D-11, D-12: many at once, small pools, and nothing that grows."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from skippy_client import Generation, SkippyClient, SkippyError
from skippy_tools import guard
from skippy_tools.server import ServerProcess

from tests.triton.support import assert_idle, client_of, generate_all
from tests.triton_server import deployment, running

pytestmark = pytest.mark.triton


def prompts(count: int, tokens: int) -> list[dict[str, object]]:
    return [
        {"prompt": f"{n} ships went to sea", "max_tokens": tokens, "ignore_eos": True} for n in range(count)
    ]


def test_d07_sessions_progress_together(client: SkippyClient) -> None:
    order: list[int] = []

    def consume(index: int) -> None:
        stream = client.stream(f"{index} ships went to sea", max_tokens=20, ignore_eos=True)
        order.extend(index for _ in stream)

    threads = [threading.Thread(target=consume, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # When the first one ends all the others have begun.
    first_to_end = min(max(i for i, who in enumerate(order) if who == index) for index in range(8))
    assert set(order[: first_to_end + 1]) == set(range(8))
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes > 40, "streams came one after the other"


@pytest.fixture(params=[32, 4])
def pool_server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with running(deployment(f"[server]\nthread_pool_size = {request.param}")) as server:
        yield server


def test_d08_d09_more_streams_than_pool_threads(pool_server: ServerProcess) -> None:
    """64 streams straight and 64 through an alias, with one instance of everything."""
    with client_of(pool_server) as client:
        alone = client.generate(**prompts(1, 16)[0])  # type: ignore[arg-type]
        for model in ("skippy", "ensemble"):
            with SkippyClient(pool_server.endpoints.grpc, model=model, timeout=100) as mine:
                results = generate_all(mine, prompts(64, 16))
            assert [r for r in results if not isinstance(r, Generation)] == []
            assert {r.num_output_tokens for r in results} == {16}  # type: ignore[union-attr]
            assert results[0].token_ids == alone.token_ids  # type: ignore[union-attr]


def shared_memory(server: ServerProcess) -> int:
    """Bytes that are really in use: regions are sparse files."""
    return sum(region.stat().st_blocks * 512 for region in guard.SHM.glob(f"{server.shm_prefix}*"))


def resident(server: ServerProcess) -> dict[str, int]:
    """Resident memory in MiB of the server and each stub that works."""
    names = {"tritonserver": server.pid, **server.stub_pids}
    return {name: psutil.Process(pid).memory_info().rss >> 20 for name, pid in names.items()}


def burst(client: SkippyClient, count: int, chance: random.Random) -> None:
    """Generations from 16 threads, a fifth of them cancelled at a random moment; the others succeed."""
    errors: list[SkippyError] = []
    numbers = iter(range(count))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                number = next(numbers, None)
                cancelled, delay = chance.random() < 0.2, chance.random() * 0.2
            if number is None:
                return
            stream = client.stream(f"{number} ships", max_tokens=12, ignore_eos=True)
            if cancelled:
                time.sleep(delay)
                stream.cancel()
            try:
                stream.result()
            except SkippyError as error:
                if not cancelled:
                    errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("model", ["skippy", "ensemble"])
def test_d12_nothing_grows_over_500_requests(model: str) -> None:
    with running(deployment("[kv]\ntokens = 8192")) as server, client_of(server) as client:
        with SkippyClient(server.endpoints.grpc, model=model, timeout=100) as mine:
            chance = random.Random(1)
            burst(mine, 100, chance)
            assert_idle(client)
            shm, rss = shared_memory(server), resident(server)
            burst(mine, 500, chance)
            assert_idle(client)
        assert shared_memory(server) <= shm + (1 << 20)
        grown = {name: size - rss[name] for name, size in resident(server).items()}
        assert all(growth < 24 for growth in grown.values()), grown


def test_d11_errors_leave_no_shared_memory(two_stage_server: ServerProcess, client: SkippyClient) -> None:
    def fail(count: int) -> None:
        for _ in range(count):
            with pytest.raises(SkippyError):
                client.generate("a", temperature=-1.0)

    fail(100)
    before = shared_memory(two_stage_server)
    fail(500)
    assert shared_memory(two_stage_server) <= before + (1 << 20)


def test_a_full_queue_and_a_long_wait_are_refused(tmp_path: Path) -> None:
    toml = "[scheduler]\nmax_sessions = 2\n[limits]\nmax_queue = 2\nqueue_timeout_s = 0.5\n[server]\naliases = []"
    with running(deployment(toml)) as server, client_of(server) as client:
        results = generate_all(client, prompts(12, 150))
        refused = [r for r in results if isinstance(r, SkippyError)]
        served = [r for r in results if isinstance(r, Generation)]
        assert len(served) >= 2
        assert refused
        assert {type(r).__name__ for r in refused} == {"ServerUnavailable"}
        assert any("queue is full" in str(r) for r in refused)
        assert client.status().ready
