"""Claims about blocks: their number, their owners, copy-on-write, and books that balance."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from pagegen.errors import ConfigError
from pagegen.runtime.block_manager import BlockManager
from pagegen.runtime.policies import Allocation, AuditError, Demand


def demand(num_tokens: int) -> tuple[Demand, int]:
    return Demand(range(num_tokens), num_tokens), num_tokens


def table(blocks: BlockManager, seq_id: int) -> list[int]:
    return list(blocks.block_table(seq_id))


@pytest.mark.parametrize("block_size", [1, 4, 8, 256])
def test_a_block_is_taken_when_a_token_needs_it_and_not_before(block_size: int) -> None:
    full = BlockManager(1, block_size)
    full.allocate(0, *demand(max(block_size - 1, 1)))
    assert full.can_append(0) is (block_size > 1)  # the block's last slot needs no new block
    if block_size > 1:
        full.append(0)
    assert not full.can_append(0)
    roomy = BlockManager(2, block_size)
    roomy.allocate(0, *demand(block_size))
    assert roomy.can_append(0)
    roomy.append(0)
    assert len(table(roomy, 0)) == 2


@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_a_sequence_holds_exactly_the_blocks_of_its_tokens(block_size: int) -> None:
    blocks = BlockManager(4, block_size)
    blocks.allocate(0, *demand(1))
    for num_tokens in range(2, 3 * block_size + 2):
        blocks.append(0)
        assert len(table(blocks, 0)) == -(-num_tokens // block_size) == blocks.num_used_blocks
        assert blocks.num_tokens(0) == num_tokens
        blocks.audit(full=True)


@pytest.mark.parametrize(
    ("num_tokens", "headroom", "answer"),
    [
        (0, 0, Allocation.OK),
        (8, 0, Allocation.OK),
        (9, 0, Allocation.LATER),
        (8, 1, Allocation.LATER),
        (16, 9, Allocation.LATER),
        (17, 0, Allocation.NEVER),
    ],
)
def test_allocation_is_possible_now_later_or_never(num_tokens: int, headroom: int, answer: Allocation) -> None:
    blocks = BlockManager(4, 4)
    blocks.allocate(0, *demand(7))
    assert blocks.can_allocate(demand(num_tokens)[0], headroom=headroom) is answer


def test_a_failed_growth_changes_nothing() -> None:
    blocks = BlockManager(3, 4)
    blocks.allocate(0, *demand(8))
    assert not blocks.can_append(0, 12)
    with pytest.raises(ValueError, match="needs 3 blocks for 12 tokens, 1 are free"):
        blocks.append(0, 12)
    with pytest.raises(ValueError, match="needs 2 blocks"):
        blocks.allocate(1, *demand(5))
    assert (len(table(blocks, 0)), blocks.num_tokens(0), blocks.num_free_blocks) == (2, 8, 1)
    blocks.audit(full=True)
    blocks.allocate(1, *demand(4))  # the failed allocation left no trace of sequence 1


def test_freeing_twice_gives_no_block_to_two_owners() -> None:
    blocks = BlockManager(4, 2)
    blocks.allocate(0, *demand(2))
    assert blocks.free(0) == 1
    assert blocks.free(0) == 0
    assert blocks.free(99) == 0
    for seq_id in range(1, 5):
        blocks.allocate(seq_id, *demand(2))
    assert sorted(block for seq_id in range(1, 5) for block in table(blocks, seq_id)) == [0, 1, 2, 3]
    blocks.audit(full=True)


def test_ten_requests_in_turn_leave_the_pool_as_it_was() -> None:
    blocks = BlockManager(8, 4)
    for seq_id in range(10):
        blocks.allocate(seq_id, *demand(16))
        blocks.free(seq_id)
        assert blocks.num_free_blocks == 8
        blocks.audit(full=True)


def test_an_id_that_holds_blocks_cannot_be_allocated_or_forked_into() -> None:
    blocks = BlockManager(4, 2)
    blocks.allocate(0, *demand(2))
    blocks.allocate(1, *demand(2))
    with pytest.raises(ValueError, match="already holds"):
        blocks.allocate(0, *demand(2))
    with pytest.raises(ValueError, match="already holds"):
        blocks.fork(0, 1)
    blocks.audit(full=True)


def test_the_vllm_papers_figure_6() -> None:
    """A prompt of 7 in blocks of 4 fills one and 3/4 of another; the 8th token takes no block, the 9th does."""
    blocks = BlockManager(9, 4)
    blocks.allocate(0, *demand(7))
    first, second = table(blocks, 0)
    assert blocks.append(0) == [] and table(blocks, 0) == [first, second]
    assert blocks.append(0) == [] and table(blocks, 0)[:2] == [first, second]
    assert len(table(blocks, 0)) == 3 and blocks.num_tokens(0) % 4 == 1


def test_the_vllm_papers_figure_8() -> None:
    """Two samples of one prompt: the first writer copies the partial block, the second writes in place."""
    blocks = BlockManager(9, 4)
    blocks.allocate(1, *demand(7))
    blocks.fork(1, 2)
    shared, partial = table(blocks, 1)
    assert blocks.ref_count(shared) == blocks.ref_count(partial) == 2
    ((source, destination),) = blocks.append(1)
    assert source == partial and table(blocks, 1) == [shared, destination] and blocks.ref_count(partial) == 1
    assert blocks.append(2) == [] and table(blocks, 2) == [shared, partial]
    blocks.audit(full=True)


def test_three_forks_of_a_partial_block_end_in_three_blocks_after_two_copies() -> None:
    blocks = BlockManager(9, 4)
    blocks.allocate(0, *demand(6))
    for child in (1, 2):
        blocks.fork(0, child)
    full, partial = table(blocks, 0)
    copies = [pair for seq_id in range(3) for pair in blocks.append(seq_id)]
    assert [source for source, _ in copies] == [partial, partial]
    assert len({table(blocks, seq_id)[-1] for seq_id in range(3)}) == 3
    assert blocks.ref_count(full) == 3
    blocks.free(1)
    assert blocks.ref_count(full) == 2
    for seq_id in (0, 2):
        blocks.free(seq_id)
    assert blocks.num_free_blocks == 9
    blocks.audit(full=True)


def test_forking_at_a_block_boundary_copies_nothing() -> None:
    blocks = BlockManager(9, 4)
    blocks.allocate(0, *demand(8))
    blocks.fork(0, 1)
    assert blocks.append(0) == blocks.append(1) == []
    assert table(blocks, 0)[:2] == table(blocks, 1)[:2] and table(blocks, 0)[2] != table(blocks, 1)[2]


def test_copy_on_write_needs_a_block_of_its_own() -> None:
    blocks = BlockManager(1, 4)
    blocks.allocate(0, *demand(2))
    blocks.fork(0, 1)
    assert not blocks.can_append(0)
    blocks.free(1)
    assert blocks.can_append(0)


def test_a_pool_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        BlockManager(0, 16)


def test_the_audit_sees_a_reference_that_nobody_wrote_down() -> None:
    blocks = BlockManager(4, 4)
    blocks.allocate(0, *demand(4))
    blocks._device.pool.take()
    with pytest.raises(AuditError):
        blocks.audit()


class BlockManagerMachine(RuleBasedStateMachine):
    """Any history of allocate, append, fork and free, against a model that knows only each sequence's length.

    Contents are modelled too: `cells` is what a kernel would have written, so a block written by two owners shows.
    """

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(7, 3)
        self.next_id = 0
        self.tokens: dict[int, list[int]] = {}
        self.cells: dict[tuple[int, int], int] = {}
        self.stamp = 0

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def write(self, seq_id: int, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self.stamp += 1
            position = len(self.tokens[seq_id])
            self.tokens[seq_id].append(self.stamp)
            self.cells[self.blocks.block_table(seq_id)[position // 3], position % 3] = self.stamp

    @rule(target=sequences, num_tokens=st.integers(0, 24))
    def allocate(self, num_tokens: int) -> int:
        seq_id, free = self.new_id(), self.blocks.num_free_blocks
        answer = self.blocks.can_allocate(demand(num_tokens)[0])
        assert answer == (
            Allocation.NEVER if num_tokens > 21 else Allocation.OK if num_tokens <= 3 * free else Allocation.LATER
        )
        if answer is not Allocation.OK:
            return seq_id  # an id that holds nothing: free must bear it
        self.blocks.allocate(seq_id, *demand(num_tokens))
        self.tokens[seq_id] = []
        self.write(seq_id, num_tokens)
        return seq_id

    @rule(seq_id=sequences, num_tokens=st.integers(0, 7))
    def append(self, seq_id: int, num_tokens: int) -> None:
        if seq_id not in self.tokens:
            return
        if not self.blocks.can_append(seq_id, num_tokens):
            with pytest.raises(ValueError, match="are free"):
                self.blocks.append(seq_id, num_tokens)
            return
        copies = self.blocks.append(seq_id, num_tokens)
        assert len(copies) <= 1
        for source, destination in copies:
            self.cells |= {(destination, i): self.cells[source, i] for i in range(3) if (source, i) in self.cells}
        self.write(seq_id, num_tokens)

    @rule(target=sequences, parent=sequences)
    def fork(self, parent: int) -> int:
        child = self.new_id()
        if parent in self.tokens:
            self.blocks.fork(parent, child)
            self.tokens[child] = list(self.tokens[parent])
        return child

    @rule(seq_id=consumes(sequences), twice=st.booleans())
    def free(self, seq_id: int, twice: bool) -> None:
        before = self.blocks.num_free_blocks
        assert self.blocks.free(seq_id) == self.blocks.num_free_blocks - before
        if twice:
            assert self.blocks.free(seq_id) == 0
        self.tokens.pop(seq_id, None)

    @precondition(lambda self: self.tokens)
    @rule()
    def free_all(self) -> None:
        for seq_id in list(self.tokens):
            self.blocks.free(seq_id)
        self.tokens.clear()
        assert self.blocks.num_free_blocks == 7

    @invariant()
    def books_balance(self) -> None:
        self.blocks.audit(full=True)

    @invariant()
    def every_sequence_reads_what_it_wrote(self) -> None:
        for seq_id, tokens in self.tokens.items():
            blocks = self.blocks.block_table(seq_id)
            assert [self.cells[blocks[i // 3], i % 3] for i in range(len(tokens))] == tokens


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
