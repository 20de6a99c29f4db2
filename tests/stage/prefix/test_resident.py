"""Resident prefixes case by case: what matches, what is shared, what a lease keeps, what goes first."""

from __future__ import annotations

import time

import pytest
from skippy_stage.errors import SkippyError

from tests.stage.prefix.driving import Resident, forward

A = tuple(range(1, 41))


def test_any_common_prefix_of_a_recorded_path_is_found() -> None:
    stage = Resident()
    assert stage.made(1, A[:10]) == 10
    for asked, found in [
        (A[:10], 10),
        (A[:20], 10),
        (A[:3], 3),
        ((*A[:6], 99, 100), 6),
        ((*A[:9], 99), 9),
        ((99, *A), 0),
        ((), 0),
    ]:
        assert stage.longest(asked) == found
    stage.check_empty()


def test_namespaces_share_nothing() -> None:
    stage = Resident()
    stage.made(1, A[:10], "one")
    assert [stage.longest(A, space) for space in ("", "one", "two")] == [0, 10, 0]
    assert stage.made(2, A[:6], "two") == 6
    assert [stage.longest(A, space) for space in ("", "one", "two")] == [0, 10, 6]
    stage.check_empty()


@pytest.mark.parametrize("length", range(1, 11))
def test_a_restored_session_goes_on_as_if_it_had_computed_all(length: int) -> None:
    stage = Resident()
    stage.made(1, A[:10])
    assert stage.restored(2, A[:length]) == length
    stage.run(2, [77, 78])
    assert stage.engine.columns(2) == stage.engine.columns_of([*A[:length], 77, 78])
    assert stage.longest(A) == 10, "the record is as it was"
    stage.close(2)
    stage.check_empty()


def test_restoring_takes_no_blocks_and_appending_one_copy() -> None:
    stage = Resident(blocks=4)
    stage.made(1, A[:10])
    free = stage.blocks.blocks_free
    stage.restored(2, A[:10])
    assert stage.blocks.blocks_free == free == 1
    stage.run(2, [77])
    assert stage.blocks.blocks_free == 0
    usage = stage.engine.usage()
    assert (usage.blocks_used, usage.blocks_prefix) == (3, 1)


def test_a_record_shares_the_blocks_of_what_is_there() -> None:
    stage = Resident()
    stage.made(1, A[:8])
    stage.run(2, A[:14])
    assert stage.store.record(2, "", A[:14]) == 6
    assert stage.store.record(2, "", A[:14]) == 0
    assert stage.store.record(2, "", A[:5]) == 0
    assert stage.store.status().entries == stage.store.status().blocks + 2 == 4
    stage.close(2)
    assert stage.store.status().blocks == 4, "what the second session computed again is free"
    stage.check_empty()


def test_paths_that_part_inside_a_block() -> None:
    stage = Resident()
    stage.made(1, (1, 2, 3, 4, 5))
    assert stage.made(2, (1, 2, 9, 9, 9)) == 3
    assert stage.made(3, (1, 2, 3, 4, 6, 7)) == 2
    assert stage.longest((1, 2, 9, 9, 9)) == 5
    assert stage.longest((1, 2, 3, 4, 6)) == 5
    assert stage.longest((1, 2, 5)) == 2
    stage.check_empty()


def test_a_longer_end_takes_the_place_of_a_shorter_one() -> None:
    stage = Resident()
    stage.made(1, A[:5])
    assert stage.made(2, A[:7]) == 2
    assert stage.made(3, A[:6]) == 0
    assert stage.store.status().entries == 2
    assert stage.store.status().evicted == 0
    stage.check_empty()


def test_a_leased_shorter_end_stays() -> None:
    stage = Resident()
    stage.made(1, A[:5])
    assert stage.store.probe(9, "", A).longest == 5
    assert stage.made(2, A[:7]) == 2
    assert stage.store.status().entries == 3
    stage.engine.open(9, 16)
    assert stage.store.restore(9, 5) == A[:5]
    stage.close(9)
    stage.check_empty()


def test_a_record_of_less_than_the_session_has_grows_later() -> None:
    """The same block then holds more of the path, leased or not."""
    stage = Resident()
    stage.run(1, A[:12])
    assert stage.store.record(1, "", A[:5]) == 5
    stage.store.probe(9, "", A)
    assert stage.store.record(1, "", A[:7]) == 2
    assert stage.store.record(1, "", A[:12]) == 5
    assert stage.store.status().entries == 3
    stage.check()
    stage.store.release(9)
    stage.close(1)
    assert stage.restored(2, A) == 12
    stage.close(2)
    stage.check_empty()


def test_a_record_outlives_what_its_session_does() -> None:
    stage = Resident()
    stage.run(1, A[:10])
    stage.store.record(1, "", A[:10])
    stage.run(1, [70, 71, 72])
    stage.run(1, [80], past=3)
    stage.run(1, [90] * 9, past=0)
    assert stage.longest(A) == 10
    stage.close(1)
    stage.restored(2, A)
    stage.close(2)
    stage.check_empty()


def test_only_what_is_missing_is_evicted_and_the_oldest_first() -> None:
    stage = Resident(blocks=6)
    for session, first in enumerate((1, 11, 21)):
        stage.made(session, range(first, first + 8))
    stage.longest(range(1, 9))
    stage.run(9, [99])
    assert stage.store.status().evicted == 1
    assert [stage.longest(range(first, first + 8)) for first in (1, 11, 21)] == [8, 4, 8]
    stage.run(9, [99] * 4)
    assert stage.store.status().evicted == 2
    assert [stage.longest(range(first, first + 8)) for first in (1, 11, 21)] == [8, 0, 8]
    stage.close(9)
    stage.check_empty()


def test_a_use_renews_what_it_finds() -> None:
    """A probe does, and a record of what is there; what is found then counts for more than before."""
    stage = Resident(blocks=7)
    stage.made(1, A[:4])
    stage.made(2, range(51, 55))
    stage.made(3, range(61, 69))
    stage.made(4, A[:4])
    stage.store.reclaim(1)
    assert [stage.longest(tokens) for tokens in (A, range(51, 55), range(61, 69))] == [4, 0, 8]
    stage = Resident(blocks=7)
    stage.made(1, A[:4])
    stage.made(2, range(51, 55))
    stage.made(3, range(61, 69))
    stage.store.reclaim(1)
    assert stage.longest(range(51, 55)) == 4
    stage.store.reclaim(1)
    assert [stage.longest(tokens) for tokens in (A, range(51, 55), range(61, 69))] == [0, 4, 4]


def test_of_what_was_used_at_the_same_time_the_cheaper_goes_first() -> None:
    """Later blocks attend to more; blocks filled in part give less back."""
    stage = Resident(blocks=7)
    stage.made(1, A[:12])
    stage.made(2, range(51, 59))
    stage.made(3, [61])

    def left() -> set[int]:
        return {max(tokens) for _, tokens in stage.paths().values()}

    assert left() == {4, 8, 12, 54, 58, 61}
    for gone in (61, 58, 54, 12, 8, 4):
        assert gone in left()
        stage.store.reclaim(1)
        assert gone not in left()


def test_what_a_session_holds_goes_last() -> None:
    """It would free nothing, however old it is."""
    stage = Resident(blocks=4)
    stage.run(1, A[:4])
    stage.store.record(1, "", A[:4])
    stage.made(2, range(51, 63))
    stage.store.reclaim(2)
    assert stage.longest(A) == 4
    assert stage.longest(range(51, 63)) == 4
    stage.store.reclaim(1)
    assert stage.longest(A) == 4
    stage.store.reclaim(1)
    assert stage.longest(A) == 0
    assert stage.blocks.blocks_free == 3
    stage.close(1)
    stage.check_empty()


def test_leases_keep_what_they_cover() -> None:
    stage = Resident(blocks=4)
    stage.made(1, A[:15])
    assert stage.store.probe(9, "", A[:10]).longest == 10
    assert stage.store.leased(9) == A[:10]
    with pytest.raises(SkippyError, match="no KV block is free"):
        stage.run(2, [99] * 5)
    assert stage.longest(A) == 12, "the block that the lease ends in is kept whole"
    stage.close(2)
    stage.engine.open(9, 16)
    assert stage.store.restore(9, 9) == A[:9]
    assert stage.store.leased(9) == A[:8]
    stage.run(9, [77, 78, 79])
    assert stage.engine.columns(9) == stage.engine.columns_of([*A[:9], 77, 78, 79])
    stage.close(9)
    stage.check_empty()


def test_the_copy_of_the_last_block_is_spared_when_there_is_no_room_for_it() -> None:
    stage = Resident(blocks=2)
    stage.made(1, A[:6])
    stage.restored(2, A[:6])
    stage.run(2, [77])
    assert stage.store.status().evicted == 1
    assert stage.longest(A) == 4
    assert stage.blocks.blocks_free == 0
    stage.close(2)
    stage.check_empty()


def test_two_sessions_in_one_batch_share_what_they_write_into() -> None:
    """The record's end goes; one of them gets a copy, the other has the block to itself."""
    stage = Resident(blocks=3)
    stage.made(1, A[:6])
    stage.restored(2, A[:6])
    stage.restored(3, A[:6])
    forward(stage.engine, (2, 6, [77]), (3, 6, [78]))
    stage.check()
    assert stage.engine.columns(2) == stage.engine.columns_of([*A[:6], 77])
    assert stage.engine.columns(3) == stage.engine.columns_of([*A[:6], 78])
    assert stage.engine.usage().blocks_used == 3


def test_blocks_under_a_session_go_when_nothing_else_is_left() -> None:
    """Blocks of the path that no sequence holds lie above one that a session holds."""
    stage = Resident(blocks=4)
    stage.made(1, A[:4])
    stage.run(2, A[:8])
    stage.store.record(2, "", A[:8])
    assert stage.blocks.blocks_exclusive == 1
    stage.run(2, [77] * 8)
    assert stage.store.status().entries == 0
    stage.close(2)
    stage.check_empty()


def test_a_new_lease_takes_the_place_of_the_old_one() -> None:
    stage = Resident(blocks=4)
    stage.made(1, A[:8])
    stage.made(2, range(51, 59))
    stage.store.probe(9, "", A)
    stage.store.probe(9, "", range(51, 59))
    stage.store.reclaim(4)
    assert stage.longest(A) == 0
    assert stage.longest(range(51, 59)) == 8
    stage.store.probe(9, "", A)
    assert (stage.store.leased(9), stage.store.status().leases) == ((), 0)


def test_all_leases_end_at_once_and_records_stay() -> None:
    stage = Resident()
    stage.made(1, A[:8])
    for session in range(5, 9):
        stage.store.probe(session, "", A)
    assert stage.store.status().leases == 4
    stage.store.release_all()
    assert stage.store.status().leases == 0
    assert stage.longest(A) == 8
    stage.check_empty()


def test_restores_that_are_not_covered() -> None:
    stage = Resident()
    stage.made(1, A[:8])
    stage.engine.open(9, 6)
    with pytest.raises(SkippyError, match="session 9: restore of 1 positions, 0 are leased"):
        stage.store.restore(9, 1)
    assert stage.store.restore(9, 0) == ()
    stage.store.probe(9, "", A)
    for length in (-1, 9):
        with pytest.raises(SkippyError, match=f"restore of {length} positions, 8 are leased"):
            stage.store.restore(9, length)
    with pytest.raises(SkippyError, match="sequence 9: 8 positions restored, opened for 6"):
        stage.store.restore(9, 8)
    assert stage.store.leased(9) == A[:8], "the lease is still there"
    assert stage.store.restore(9, 6) == A[:6]
    with pytest.raises(SkippyError, match="sequence 9 has 6 positions"):
        stage.store.restore(9, 3)
    stage.store.probe(8, "", A)
    with pytest.raises(SkippyError, match="sequence 8 is not open"):
        stage.store.restore(8, 3)
    assert stage.store.restore(8, 0) == ()
    assert stage.store.leased(8) == ()
    stage.close(9)
    stage.check_empty()


def test_records_that_make_no_sense() -> None:
    stage = Resident()
    with pytest.raises(SkippyError, match="sequence 1 is not open"):
        stage.store.record(1, "", A[:1])
    stage.run(1, A[:5])
    for tokens in ((), A[:6]):
        with pytest.raises(SkippyError, match=f"session 1: record of {len(tokens)} positions, 5 are cached"):
            stage.store.record(1, "", tokens)
    stage.store.record(1, "", A[:5])
    with pytest.raises(SkippyError, match="recorded already, under another prefix"):
        stage.store.record(1, "other", A[:5])
    stage.check()
    stage.close(1)
    stage.check_empty()


def test_a_bound_on_recorded_tokens() -> None:
    stage = Resident(max_tokens=10)
    assert stage.made(1, A[:14]) == 10
    assert stage.longest(A) == 10
    assert stage.store.status().dropped == 1
    assert stage.made(2, range(51, 57)) == 6
    assert stage.store.status().tokens == 10
    assert (stage.longest(A), stage.longest(range(51, 57))) == (4, 6)
    stage.store.probe(9, "", range(51, 57))
    assert stage.made(3, (*range(51, 57), 60, 61, 62)) == 2, "beside the leased end"
    assert stage.store.status().tokens == 10
    assert stage.longest(A) == 0
    stage.store.release(9)
    stage.check_empty()


def test_a_bound_takes_nothing_from_the_path_that_is_recorded() -> None:
    stage = Resident(max_tokens=7)
    stage.made(1, A[:6])
    assert stage.made(2, (*A[:5], 99)) == 0
    assert stage.longest(A) == 6
    assert stage.made(3, A[:7]) == 1, "what takes the place of the shorter end needs no more than it does"
    assert stage.store.status().tokens == 7
    assert (stage.store.status().evicted, stage.store.status().dropped) == (0, 1)
    stage.check_empty()


def test_counts() -> None:
    stage = Resident(blocks=8)
    stage.made(1, A[:10])
    stage.longest((99,))
    stage.restored(2, A[:7])
    status = stage.store.status()
    assert (status.payload, status.entries, status.blocks, status.tokens) == ("resident-kv", 3, 1, 10)
    assert (status.leases, status.lookups, status.hits) == (1, 2, 1)
    assert (status.restored_tokens, status.recorded_tokens) == (7, 10)
    assert (status.evicted, status.dropped, status.bytes) == (0, 0, 0)


def test_nothing_grows_with_what_was_used() -> None:
    stage = Resident(blocks=4)
    for turn in range(500):
        stage.store.probe(1, f"client-{turn}", A)
        stage.store.release(1)
        stage.made(turn, [turn, turn + 1], f"client-{turn}")
    store = stage.store
    assert len(store._tree._roots) == 4
    assert len(store._queue._heap) < 100
    stage.check_empty()
    assert not store._tree._roots


def test_a_long_probe_is_fast() -> None:
    """Also where thousands of prompts part in the same block."""
    stage = Resident(blocks=12000, block_tokens=16)
    tokens = [n % 50021 for n in range(4000)]
    engine = stage.blocks
    engine.open(1, 4000)
    engine._known(1).table.append(4000)
    stage.store.record(1, "", tokens)
    for other in range(3000):
        engine.open(2, 64)
        engine._known(2).table.append(32)
        stage.store.record(2, "", [*tokens[:24], 7_000_000 + other, *range(7)])
        engine.close(2)
    best = 1.0
    for _ in range(20):
        start = time.perf_counter()
        assert stage.store.probe(5, "", tokens).longest == 4000
        assert stage.store.probe(5, "", [*tokens[:30], 1]).longest == 30
        best = min(best, time.perf_counter() - start)
    assert best < 2e-3
