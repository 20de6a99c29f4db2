"""KV block accounting against a model that writes down what every position holds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)
from skippy_stage.kv_cache import BlockPool, BlockTable, OutOfBlocksError

TEXTS = st.integers(0, 14)


class KvCacheMachine(RuleBasedStateMachine):
    """Tables grow, are cut, recorded, adopted and released.

    ``memory`` is what an engine would have in its cache, ``records`` what the prefix store believes of its
    blocks.
    """

    tables: Bundle[BlockTable] = Bundle("tables")

    @initialize(blocks=st.integers(1, 12), size=st.integers(1, 5))
    def start(self, blocks: int, size: int) -> None:
        self.size = size
        self.pool = BlockPool(blocks, size)
        self.memory = [[-1] * size for _ in range(blocks)]
        self.expected: dict[int, tuple[BlockTable, list[int]]] = {}
        self.records: dict[int, list[int]] = {}
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
            assert copy.tokens == before[1] % self.size
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

    @rule(table=tables)
    def record(self, table: BlockTable) -> None:
        """The prefix store becomes a holder of all that it does not hold yet."""
        text, used = self.expected[id(table)][1], self.pool.used
        for at, block in enumerate(table.blocks):
            if not self.pool.is_recorded(block):
                self.pool.record(block)
                self.records[block] = text[at * self.size : (at + 1) * self.size]
        assert self.pool.used == used, "recording takes no blocks"

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def forget(self, data: Any) -> None:
        block = data.draw(st.sampled_from(sorted(self.records)))
        free, alone = self.pool.free, self.pool.is_recorded_alone(block)
        del self.records[block]
        assert self.pool.forget(block) == alone
        assert self.pool.free == free + alone

    @precondition(lambda self: self.records)
    @rule(target=tables, data=st.data())
    def adopt(self, data: Any) -> BlockTable:
        """A new table starts with what is recorded: full blocks, and one perhaps not to its end."""
        full = [block for block, text in self.records.items() if len(text) == self.size]
        blocks = data.draw(st.lists(st.sampled_from(full), unique=True, max_size=3)) if full else []
        text = [token for block in blocks for token in self.records[block]]
        last = data.draw(st.sampled_from(sorted(self.records)))
        if last not in blocks:
            blocks.append(last)
            text += self.records[last][: data.draw(st.integers(1, len(self.records[last])))]
        used = self.pool.used
        table = BlockTable(self.pool)
        table.adopt(blocks, len(text))
        assert self.pool.used == used, "sharing takes no blocks"
        self.expected[id(table)] = (table, text)
        return table

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
    def recorded_blocks_never_change(self) -> None:
        for block, text in self.records.items():
            assert self.memory[block][: len(text)] == text

    @invariant()
    def accounting_is_right_and_within_the_budget(self) -> None:
        tables = [table for table, _ in self.expected.values()]
        self.pool.check_integrity(tables)
        for table in tables:
            table.check_integrity()
        in_tables = {block for table in tables for block in table.blocks}
        used = in_tables | self.records.keys()
        assert self.pool.used == len(used) <= self.pool.total
        assert self.pool.recorded == len(self.records)
        assert self.pool.recorded_alone == len(self.records.keys() - in_tables)
        assert self.pool.free == self.pool.total - len(used)

    def teardown(self) -> None:
        for table, _ in self.expected.values():
            table.cut(0)
        assert self.pool.used == self.pool.recorded_alone == len(self.records)
        for block in self.records:
            assert self.pool.forget(block), "nobody else holds it now"
        assert self.pool.used == 0
        self.pool.check_integrity([])


KvCacheMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestKvCache = KvCacheMachine.TestCase


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for_tokens(tokens: int, blocks: int) -> None:
    assert BlockPool(8, 4).blocks_for(tokens) == blocks


def adopted(pool: BlockPool, blocks: list[int], length: int) -> BlockTable:
    table = BlockTable(pool)
    table.adopt(blocks, length)
    return table


def test_a_shared_block_is_copied_once_by_whoever_writes_first() -> None:
    pool = BlockPool(4, 4)
    one = BlockTable(pool)
    one.append(6)
    two = adopted(pool, one.blocks, 6)
    (copy,) = one.append(1)
    assert (copy.source, copy.target, copy.tokens) == (two.blocks[1], one.blocks[1], 2)
    assert two.append(1) == [], "the other is its only holder now"


def test_a_recorded_block_is_copied_by_the_sequence_that_made_it() -> None:
    pool = BlockPool(4, 4)
    table = BlockTable(pool)
    table.append(6)
    recorded = table.blocks[1]
    pool.record(recorded)
    (copy,) = table.append(1)
    assert (copy.source, copy.tokens) == (recorded, 2)
    assert pool.is_recorded_alone(recorded)
    assert table.append(1) == []


def test_a_forgotten_block_is_not_copied() -> None:
    pool = BlockPool(2, 4)
    table = BlockTable(pool)
    table.append(6)
    pool.record(table.blocks[1])
    assert table.blocks_to_append(1) == 1
    assert not pool.forget(table.blocks[1])
    assert table.append(1) == []


def test_a_shared_block_cut_inside_stays_for_the_others() -> None:
    pool = BlockPool(4, 4)
    one = BlockTable(pool)
    one.append(8)
    two = adopted(pool, one.blocks, 5)
    assert two.blocks == one.blocks
    (copy,) = two.append(1)
    assert copy.tokens == 1
    assert two.blocks[0] == one.blocks[0]
    assert two.blocks[1] != one.blocks[1]


def test_a_full_shared_block_is_not_copied() -> None:
    pool = BlockPool(4, 4)
    one = BlockTable(pool)
    one.append(4)
    assert adopted(pool, one.blocks, 4).append(1) == []


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
    other = 0 if table.blocks[0] else 1
    for wrong in (
        lambda: table.cut(4),
        lambda: table.cut(-1),
        lambda: table.adopt(table.blocks, 3),
        lambda: BlockTable(pool).adopt(table.blocks, 5),
        lambda: BlockTable(pool).adopt([other], 1),
        lambda: pool.retain(other),
        lambda: pool.release(other),
        lambda: pool.record(other),
        lambda: pool.forget(other),
        lambda: pool.check_integrity([]),
        lambda: pool.check_integrity([table, table]),
    ):
        with pytest.raises(AssertionError):
            wrong()
    pool.check_integrity([table])
    table.blocks.append(table.blocks[0])
    with pytest.raises(AssertionError, match="2 blocks for 3 positions"):
        table.check_integrity()


def test_a_recorded_block_has_one_record_and_is_no_tables_to_release() -> None:
    pool = BlockPool(2, 4)
    table = BlockTable(pool)
    table.append(3)
    (block,) = table.blocks
    pool.record(block)
    pool.check_integrity([table])
    with pytest.raises(AssertionError, match="recorded already"):
        pool.record(block)
    with pytest.raises(AssertionError, match="1 holders, 2 counted"):
        pool.check_integrity([])
    table.cut(0)
    pool.check_integrity([])
    with pytest.raises(AssertionError, match="no table holds it"):
        pool.release(block)
