"""The request pool: where every request stands, and the moves between waiting, running and preempted.

Policies decide who moves; this does it, and is the only one that asks the memory for anything.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Callable
from enum import StrEnum

from pagegen.runtime.policies import Allocation, Demand, MemoryPolicy
from pagegen.runtime.scheduling.events import Branch
from pagegen.runtime.scheduling.plan import Iteration, Transfer, TransferKind, add_transfer
from pagegen.runtime.scheduling.preemption import Preemption, PreemptionCosts
from pagegen.runtime.scheduling.queue import WaitingQueue
from pagegen.runtime.sequence import GroupStatus, Sequence, SequenceGroup


class WaitReason(StrEnum):
    """What a waiting request waits for."""

    BUDGET = "budget"  # tokens of an iteration
    SEATS = "max-num-seqs"  # sequences that may run together
    BLOCKS = "blocks"  # KV blocks
    GROUP = "group"  # KV blocks for all of its sequences; there are enough for its prompt
    BATCH = "batch"  # the batch that runs ends as a whole
    PREEMPTED_FIRST = "preempted-first"  # those that were preempted come first


class RequestPool:
    """Owner of the queues. `running` is sorted by rank; what `waiting` holds was never started, or was preempted."""

    def __init__(
        self, memory: MemoryPolicy, preemption: Preemption, costs: Callable[[], PreemptionCosts | None]
    ) -> None:
        self.memory = memory
        self.preemption = preemption
        self.costs = costs
        self.waiting = WaitingQueue()
        self.preempted: set[SequenceGroup] = set()  # those of `waiting` that have run before
        self.running: list[SequenceGroup] = []
        self.transfers: list[Transfer] = []  # of forks since the last iteration
        self.num_preemptions = self.num_swaps = 0
        self._seq_ids = itertools.count()

    @property
    def num_seqs(self) -> int:
        """Sequences that run, or will once their group is forked."""
        return sum([group.width for group in self.running])

    def new_seq_id(self) -> int:
        return next(self._seq_ids)

    # --- admission ---------------------------------------------------------------------------------------------------

    def demand(self, group: SequenceGroup) -> Demand:
        """What the group asks for when it is admitted: for one sequence all of its tokens, for several the prompt."""
        request, first = group.request, group.active[0]
        final = request.final_num_tokens
        return Demand(
            request.prompt_token_ids if group.width > 1 else first.token_ids,
            group.max_kv_tokens,
            None if final is None else final - 1,
            request.salt,
            (("request", str(first.seq_id)),) if request.score_prompt else (),  # a key that nobody else has
            group.width,
            group.prompt_len,
        )

    def never_fits(self, group: SequenceGroup) -> bool:
        """Whether a waiting group could not have its blocks even if it had everything that is not pinned."""
        if group.status is GroupStatus.SWAPPED:  # what it may need is known from its tables
            return False
        return self.memory.can_allocate(self.demand(group)) is Allocation.NEVER

    def misfit(self, group: SequenceGroup, headroom: int) -> WaitReason | None:
        """Why the group cannot have its blocks while `headroom` blocks stay free for others; None if it can.

        Where nobody runs there is nobody to leave blocks to: whatever was accepted fits then.
        """
        if not self.running:
            headroom = 0
        if group.status is GroupStatus.SWAPPED:
            own = group.width if self.running else 0
            fits = self.memory.can_swap_in(group.active_ids, headroom=headroom + own)
            return None if fits else WaitReason.BLOCKS
        demand, own = self.demand(group), self._growth_after_fork(group)
        if self.memory.can_allocate(demand, headroom=headroom + own) is Allocation.OK:
            return None
        alone = own > 0 and self.memory.can_allocate(demand, headroom=headroom) is Allocation.OK
        return WaitReason.GROUP if alone else WaitReason.BLOCKS

    def _growth_after_fork(self, group: SequenceGroup) -> int:
        """Blocks that a group takes beyond its prompt's as soon as it is forked: copies, outputs, a next token each."""
        if group.width == 1:
            return 0
        size, prompt_len = self.memory.block_size, group.prompt_len
        longest = min(max(prompt_len + 1, *(sequence.num_tokens for sequence in group.live)), group.max_kv_tokens)
        private = -(-longest // size) - prompt_len // size
        return group.width * private - (prompt_len % size > 0)

    def start(self, group: SequenceGroup, iteration: Iteration) -> None:
        """Gives a waiting group its blocks, from the host or new ones; needs `misfit` None."""
        self.waiting.remove(group)
        self.preempted.discard(group)
        iteration.seats -= group.width
        if group.status is GroupStatus.SWAPPED:
            iteration.move(TransferKind.SWAP_IN, self.memory.swap_in(group.active_ids))
        else:
            first = group.active[0]
            cached = self.memory.allocate(first.seq_id, self.demand(group), group.end_of(first))
            first.num_computed_tokens = cached
            if not group.num_preemptions:
                group.num_cached_tokens = cached
                group.num_saved_blocks += cached // self.memory.block_size
        group.status = GroupStatus.RUNNING
        if self.running and self.running[-1].rank > group.rank:
            insort(self.running, group, key=lambda member: member.rank)
        else:
            self.running.append(group)

    # --- rows --------------------------------------------------------------------------------------------------------

    def decode(self, iteration: Iteration) -> None:
        """Schedules the newest token of every group that decodes, by rank, as far as the budget goes."""
        groups = [group for group in self.running if group.decoding]
        total = sum([group.width for group in groups])
        while total > iteration.budget:
            total -= groups.pop().width
        sequences = [sequence for group in groups for sequence in group.active]
        lengths = [sequence.num_computed_tokens + 1 for sequence in sequences]
        if others := self.memory.extend([sequence.seq_id for sequence in sequences], lengths):
            needy = dict.fromkeys([sequences[i].group for i in others])  # in order
            stalled = {group for group in needy if not self.grow(group, iteration)}
            running = GroupStatus.RUNNING  # those that were preempted for another are not, and have no rows
            groups = [group for group in groups if group.status is running and group not in stalled]
            sequences = [sequence for group in groups for sequence in group.active]
        iteration.take_newest(sequences)

    def prefill(self, iteration: Iteration) -> None:
        """Schedules the next chunk of every running group that has more than its newest token to compute, by rank."""
        for group in [group for group in self.running if not group.decoding]:
            if not iteration.budget:
                return
            self.take(group, iteration)

    def take(self, group: SequenceGroup, iteration: Iteration) -> None:
        """Schedules as many of a running group's uncomputed tokens as the budget allows."""
        if group.status is not GroupStatus.RUNNING or not self.grow(group, iteration):
            return
        for sequence in group.active:
            num_tokens = min(group.end_of(sequence) - sequence.num_computed_tokens, iteration.budget)
            if num_tokens > 0:
                iteration.take(sequence, num_tokens)

    def grow(self, group: SequenceGroup, iteration: Iteration) -> bool:
        """Gives each active sequence the slots of the tokens it has to compute, preempting from the highest rank down.

        False if the group had to yield itself, or must wait; slots that it has got it keeps.
        """
        memory = self.memory
        if group.status is not GroupStatus.RUNNING:
            return False
        for sequence in group.active:
            seq_id = sequence.seq_id
            missing = group.end_of(sequence) - memory.num_tokens(seq_id)
            if missing <= 0:
                continue
            while not memory.can_append(seq_id, missing):
                victim = self.running[-1]
                if self.preemption is Preemption.NONE or len(self.running) == 1:
                    return False
                self.preempt(victim, iteration)
                if victim is group:
                    return False
            if copies := memory.append(seq_id, missing):
                iteration.move(TransferKind.COPY, copies)
        return True

    # --- the ways back -----------------------------------------------------------------------------------------------

    def preempt(self, victim: SequenceGroup, iteration: Iteration) -> None:
        """Takes all blocks of a running group, to the host if that is the way and has room, and lets it wait."""
        memory, active_ids, way = self.memory, victim.active_ids, self._way_back(victim)
        if self.running[-1] is victim:
            self.running.pop()
        else:
            self.running.remove(victim)
        iteration.drop(victim)
        iteration.seats += victim.width
        if way is Preemption.SWAP and memory.can_swap_out(active_ids):
            iteration.move(TransferKind.SWAP_OUT, memory.swap_out(active_ids))
            victim.status = GroupStatus.SWAPPED
            self.num_swaps += 1
        else:
            for seq_id in active_ids:
                memory.free(seq_id)
            victim.reset()
            victim.status = GroupStatus.WAITING
        victim.num_preemptions += 1
        self.num_preemptions += 1
        iteration.preempted.append(victim)
        self.preempted.add(victim)
        self.waiting.push(victim)

    def _way_back(self, victim: SequenceGroup) -> Preemption:
        if self.preemption is not Preemption.AUTO:
            return self.preemption
        if (costs := self.costs()) is None:
            return Preemption.RECOMPUTE
        blocks = {block for seq_id in victim.active_ids for block in self.memory.block_table(seq_id)}
        computed = [sequence.num_computed_tokens for sequence in victim.active]
        shared = victim.prompt_len if victim.forked else 0  # is computed once for all
        num_tokens = sum(computed) - shared * (len(computed) - 1)
        return costs.cheaper(len(blocks), num_tokens)

    def fork(self, parent: Sequence, index: int) -> Sequence:
        """A new live sequence with the parent's tokens and blocks. Its group is to be computed in step from now on."""
        group = parent.group
        child = Sequence(self.new_seq_id(), group, index, parent.token_ids)
        if not self._share(parent, child):
            group.num_saved_blocks += child.num_computed_tokens // self.memory.block_size
        group.live.append(child)
        return child

    def branch(self, group: SequenceGroup, moves: list[tuple[Sequence, Branch]]) -> None:
        """Makes beams without a child second children of others, which are computed as far."""
        size = self.memory.block_size
        for beam, branch in moves:
            parent = group.sequences[branch.parent]
            self.memory.free(beam.seq_id)
            beam.token_ids = [*parent.token_ids[: parent.num_computed_tokens], branch.token_id]
            self._share(parent, beam)
        full = [self.memory.block_table(s.seq_id)[: s.num_computed_tokens // size] for s in group.live]
        num_saved = sum(map(len, full)) - len(set(itertools.chain.from_iterable(full)))
        group.num_saved_blocks = max(group.num_saved_blocks, group.num_cached_tokens // size + num_saved)

    def fork_again(self, group: SequenceGroup) -> None:
        """Gives the others of a recovering group the prompt that the first has computed."""
        first, *others = group.live
        for sequence in others:
            self._share(first, sequence)
        group.active = group.live

    def _share(self, parent: Sequence, child: Sequence) -> bool:
        """Forks the blocks; returns whether they had to be copied."""
        copies = self.memory.fork(parent.seq_id, child.seq_id)
        add_transfer(self.transfers, TransferKind.COPY, copies)
        child.num_computed_tokens = parent.num_computed_tokens
        return bool(copies)

    def remove(self, groups: set[SequenceGroup]) -> None:
        """Forgets groups that have ended; the blocks of their sequences are freed one by one."""
        if any(group.status is GroupStatus.RUNNING for group in groups):
            self.running = [group for group in self.running if group not in groups]
        for group in groups:
            if group.status is not GroupStatus.RUNNING:
                self.waiting.remove(group)
                self.preempted.discard(group)
            group.status = GroupStatus.FINISHED
