"""KV block accounting against a model that writes down what every position holds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from skippy_stage.kv_cache import BlockPool, BlockTable, OutOfBlocksError

TEXTS = st.integers(0, 14)


class KvCacheMachine(RuleBasedStateMachine):
    """Tables grow, are cut, shared and released; ``memory`` is what an engine would have in its cache."""

    tables: Bundle[BlockTable] = Bundle("tables")

    @initialize(blocks=st.integers(1, 12), size=st.integers(1, 5))
    def start(self, blocks: int, size: int) -> None:
        self.size = size
        self.pool = BlockPool(blocks, size)
        self.memory = [[-1] * size for _ in range(blocks)]
        self.expected: dict[int, tuple[BlockTable, list[int]]] = {}
        self.written = 0

    @rule(target=tables)
    def make(self) -> BlockTable:
        table = BlockTable(self.pool)
        self.expected[id(table)] = (table, [])
        return table

    @rule(table=tables, tokens=TEXTS)
    def append(self, table: BlockTable, tokens: int) -> None:
        needed, free = table.blocks_to_append(tokens), self.pool.free
        before = list(table.blocks), table.length
        try:
            copies = table.append(tokens)
        except OutOfBlocksError:
            assert needed > free
            assert (table.blocks, table.length) == before
            assert self.pool.free == free
            return
        assert needed <= free
        assert free - self.pool.free == needed, "what was announced is what was taken"
        for copy in copies:
            assert self.pool.holders(copy.target) == 1
            self.memory[copy.target][: copy.tokens] = self.memory[copy.source][: copy.tokens]
        text = self.expected[id(table)][1]
        for position in range(len(text), len(text) + tokens):
            block = table.blocks[position // self.size]
            assert self.pool.holders(block) == 1, "written blocks are nobody else's"
            self.written += 1
            self.memory[block][position % self.size] = self.written
            text.append(self.written)

    @rule(table=tables, data=st.data())
    def cut(self, table: BlockTable, data: Any) -> None:
        length = data.draw(st.integers(0, table.length))
        table.cut(length)
        del self.expected[id(table)][1][length:]
        assert table.length == length

    @rule(target=tables, table=tables, data=st.data())
    def share(self, table: BlockTable, data: Any) -> BlockTable:
        length, used = data.draw(st.integers(0, table.length)), self.pool.used
        other = table.share(length)
        assert self.pool.used == used, "sharing takes no blocks"
        self.expected[id(other)] = (other, self.expected[id(table)][1][:length])
        return other

    @rule(table=consumes(tables))
    def release(self, table: BlockTable) -> None:
        table.cut(0)
        del self.expected[id(table)]

    @invariant()
    def every_position_holds_what_was_written(self) -> None:
        for table, text in self.expected.values():
            assert table.length == len(text)
            held = [self.memory[table.blocks[at // self.size]][at % self.size] for at in range(len(text))]
            assert held == text

    @invariant()
    def accounting_is_right_and_within_the_budget(self) -> None:
        tables = [table for table, _ in self.expected.values()]
        self.pool.check_integrity(tables)
        for table in tables:
            table.check_integrity()
        used = {block for table in tables for block in table.blocks}
        assert self.pool.used == len(used) <= self.pool.total
        assert self.pool.free == self.pool.total - len(used)

    def teardown(self) -> None:
        for table, _ in self.expected.values():
            table.cut(0)
        assert self.pool.used == 0
        self.pool.check_integrity([])


KvCacheMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestKvCache = KvCacheMachine.TestCase


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_tokens(tokens: int, blocks: int) -> None:
    assert BlockPool(8, 4).blocks_for(tokens) == blocks


def test_a_shared_block_is_copied_once_by_whoever_writes_first() -> None:
    pool = BlockPool(4, 4)
    one = BlockTable(pool)
    one.append(6)
    two = one.share(6)
    (copy,) = one.append(1)
    assert (copy.source, copy.target, copy.tokens) == (two.blocks[1], one.blocks[1], 2)
    assert two.append(1) == [], "the other is its only holder now"


def test_a_shared_block_cut_inside_stays_for_the_others() -> None:
    pool = BlockPool(4, 4)
    record = BlockTable(pool)
    record.append(8)
    session = record.share(8)
    session.cut(5)
    assert session.blocks == record.blocks
    (copy,) = session.append(1)
    assert copy.tokens == 1
    assert session.blocks[0] == record.blocks[0]
    assert session.blocks[1] != record.blocks[1]


def test_a_full_shared_block_is_not_copied() -> None:
    pool = BlockPool(4, 4)
    record = BlockTable(pool)
    record.append(4)
    assert record.share(4).append(1) == []


def test_all_or_nothing() -> None:
    pool = BlockPool(3, 4)
    table = BlockTable(pool)
    table.append(5)
    with pytest.raises(OutOfBlocksError, match="2 KV blocks needed, 1 of 3 are free"):
        table.append(8)
    assert (table.length, pool.used) == (5, 2)


def test_mistakes_of_the_caller_are_assertions() -> None:
    pool = BlockPool(2, 4)
    table = BlockTable(pool)
    table.append(3)
    for wrong in (
        lambda: table.cut(4),
        lambda: table.cut(-1),
        lambda: table.share(4),
        lambda: pool.retain(0 if table.blocks[0] else 1),
        lambda: pool.release(0 if table.blocks[0] else 1),
        lambda: pool.check_integrity([]),
        lambda: pool.check_integrity([table, table]),
    ):
        with pytest.raises(AssertionError):
            wrong()
    pool.check_integrity([table])
    table.blocks.append(table.blocks[0])
    with pytest.raises(AssertionError, match="2 blocks for 3 positions"):
        table.check_integrity()
