"""A scheduler over a scripted model whose caches are dicts of slots, for the tests of scheduling.

The next token is a hash of the whole context as read through the block table, so a lost, stale or foreign slot changes
every token after it. What a sequence should give is then known without any scheduler.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from pagegen.runtime.policies import MemoryPolicy, make_memory_policy
from pagegen.runtime.scheduler import (
    Preemption,
    PreemptionCosts,
    ScheduledBatch,
    ScheduledSequence,
    Scheduler,
    SchedulerConfig,
    TransferKind,
)
from pagegen.runtime.scheduling.events import Branch, Sampled, SchedulerEvent
from pagegen.runtime.sequence import FinishReason, GroupStatus, Request, Sequence, SequenceGroup

MAX_MODEL_LEN = 64  # of the policies that reserve it


def token_after(context: Iterable[int], index: int) -> int:
    """What sequence `index` of a request samples after a context."""
    return hash((index, *context)) % 1000


def children_of(beams: SequenceOf[SequenceOf[int]]) -> list[tuple[int, int]]:
    """(parent, token) of each beam after a step. Parents are drawn; the first child of each takes its place."""
    chance = random.Random(hash(tuple(map(tuple, beams))))
    parents = [chance.randrange(len(beams)) for _ in beams]
    spare = [parent for i, parent in enumerate(parents) if parent in parents[:i]]
    parents = [i if i in parents else spare.pop() for i in range(len(beams))]
    return [(parent, token_after(beams[parent], i)) for i, parent in enumerate(parents)]


def expected_beams(request: Request) -> list[list[int]]:
    prompt = list(request.prompt_token_ids)
    beams = [[*prompt, token_after(prompt, index)] for index in range(request.num_sequences)]
    while len(beams[0]) < request.max_num_tokens:
        beams = [[*beams[parent], token] for parent, token in children_of(beams)]
    return [beam[len(prompt) :] for beam in beams]


def expected(request: Request, index: int = 0) -> list[int]:
    """The output of a sequence that nobody disturbs."""
    if request.beams:
        return expected_beams(request)[index]
    context = list(request.prompt_token_ids)
    while len(context) < request.max_num_tokens:
        context.append(token_after(context, index))
        if context[-1] in request.stop_token_ids:
            break
    return context[len(request.prompt_token_ids) :]


class Rig:
    """`debug` audits everything after every step."""

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 16,
        budget: int = 64,
        *,
        policy: str = "default",
        memory_policy: str = "paged",
        preemption: str = "recompute",
        num_host_blocks: int = 0,
        prefix_cache: bool = False,
        costs: Callable[[], PreemptionCosts] | None = None,
        recorder: Callable[[SchedulerEvent], None] | None = None,
    ) -> None:
        self.memory: MemoryPolicy = make_memory_policy(
            memory_policy,
            num_blocks,
            block_size,
            max_model_len=MAX_MODEL_LEN,
            prefix_cache=prefix_cache,
            num_host_blocks=num_host_blocks,
        )
        config = SchedulerConfig(max_num_seqs, budget, policy, Preemption(preemption))
        self.scheduler = Scheduler(config, self.memory, costs=costs, recorder=recorder)
        self.device: dict[tuple[int, int], int] = {}
        self.host: dict[tuple[int, int], int] = {}
        self.budget = budget
        self.num_added = 0
        self.released: list[Sequence] = []

    def add(
        self,
        prompt_len: int,
        max_tokens: int,
        first: int | None = None,
        *,
        n: int = 1,
        beams: bool = False,
        priority: int = 0,
        stop_token_ids: Iterable[int] = (),
        oracle: bool = False,
    ) -> SequenceGroup:
        """A request whose prompt is `prompt_len` numbers from `first` on (from its own number if None). With an
        `oracle` it says how long it will turn out.
        """
        first = 100 * self.num_added if first is None else first
        request = Request(
            f"r{self.num_added}",
            tuple(range(first, first + prompt_len)),
            prompt_len + max_tokens,
            num_sequences=n,
            beams=beams and n > 1,
            stop_token_ids=frozenset(() if beams else stop_token_ids),
            priority=priority,
        )
        if oracle:
            longest = max(len(expected(request, index)) for index in range(n))
            request = dataclasses.replace(request, final_num_tokens=prompt_len + longest)
        self.num_added += 1
        return self.scheduler.add(request)

    def execute(self, batch: ScheduledBatch) -> list[Sampled]:
        """Moves, then writes and reads every row's slots."""
        for transfer in batch.transfers:
            source, target = {
                TransferKind.COPY: (self.device, self.device),
                TransferKind.SWAP_OUT: (self.device, self.host),
                TransferKind.SWAP_IN: (self.host, self.device),
            }[transfer.kind]
            for taken, filled in transfer.pairs:
                for i in range(self.memory.block_size):
                    target.pop((filled, i), None)
                    if (taken, i) in source:
                        target[filled, i] = source[taken, i]
        for row in batch.rows:  # all write before one reads, as the model does layer by layer
            table, tokens = self.memory.block_table(row.sequence.seq_id), row.sequence.token_ids
            for position in range(row.start, row.start + row.num_tokens):
                self.device[self._slot(table, position)] = tokens[position]
        contexts = {row.sequence: self._context(row) for row in batch.rows if row.completes}
        return [self._sample(row, contexts) for row in batch.rows]

    def _slot(self, table: Iterable[int], position: int) -> tuple[int, int]:
        block, offset = divmod(position, self.memory.block_size)
        return list(table)[block], offset

    def _context(self, row: ScheduledSequence) -> list[int]:
        """The sequence's tokens, as the cache has them."""
        table = self.memory.block_table(row.sequence.seq_id)
        context = [self.device[self._slot(table, i)] for i in range(row.start + row.num_tokens)]
        assert context == row.sequence.token_ids, "the cache does not hold the sequence's tokens"
        return context

    def _sample(self, row: ScheduledSequence, contexts: dict[Sequence, list[int]]) -> Sampled:
        if not row.completes:
            return None
        context, index, group = contexts[row.sequence], row.sequence.index, row.sequence.group
        if row.num_samples > 1:
            return tuple(token_after(context, child) for child in range(row.num_samples))
        if group.request.beams:
            parent, token = children_of([contexts[beam] for beam in group.live])[index]
            return token if parent == index else Branch(parent, token)
        return token_after(context, index)

    def step(self) -> ScheduledBatch:
        had_work = self.scheduler.has_work
        batch = self.scheduler.schedule()
        self.check(batch)
        if batch.rows:
            self.scheduler.update(batch, self.execute(batch))
        else:
            assert not had_work or self.scheduler.num_deadlocks, "an iteration without progress"
        self.released += self.scheduler.take_released()
        self.memory.audit(full=True)
        return batch

    def check(self, batch: ScheduledBatch) -> None:
        """What holds for every iteration of every policy."""
        scheduler = self.scheduler
        assert batch.num_tokens <= self.budget and scheduler.pool.num_seqs <= scheduler.config.max_num_seqs
        assert len({row.sequence.seq_id for row in batch.rows}) == len(batch.rows)
        ranks = [group.rank for group in scheduler.running]
        assert ranks == sorted(ranks)
        assert all(group.status is GroupStatus.RUNNING for group in scheduler.running)
        assert all(group.status in (GroupStatus.WAITING, GroupStatus.SWAPPED) for group in batch.preempted)
        if batch.preempted and scheduler.running:
            assert min(group.rank for group in batch.preempted) > scheduler.running[0].rank
        for row in batch.rows:
            assert row.num_tokens > 0 and row.sequence.group.status is GroupStatus.RUNNING
            assert row.start == row.sequence.num_computed_tokens
            assert row.start + row.num_tokens <= self.memory.num_tokens(row.sequence.seq_id)
        for group in scheduler.groups.values():  # all or nothing
            held = {bool(self.memory.num_tokens(sequence.seq_id)) for sequence in group.active}
            assert held <= {group.status is not GroupStatus.WAITING} or not group.live
        assert sum(scheduler.wait_reasons().values()) == len(scheduler.waiting)

    def run(self, max_steps: int = 10_000) -> int:
        """Steps until all has ended; checks that the pool is whole again."""
        for steps in range(max_steps):
            if not self.scheduler.has_work:
                assert self.memory.num_free_blocks == self.memory.num_blocks
                assert not self.scheduler.running and not self.scheduler.waiting and not self.scheduler.pool.preempted
                return steps
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps")


def output(group: SequenceGroup, index: int = 0) -> list[int]:
    return group.sequences[index].output_token_ids


def assert_as_if_alone(*groups: SequenceGroup) -> None:
    """All sequences of the groups gave what nobody's company could have changed."""
    for group in groups:
        assert len(group.sequences) == group.request.num_sequences, group
        for sequence in group.sequences:
            assert sequence.output_token_ids == expected(group.request, sequence.index), sequence
            assert sequence.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
