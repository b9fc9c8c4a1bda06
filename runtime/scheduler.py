"""Which tokens run in the next iteration, and what became of those that ran.

Iteration-level scheduling as in Yu et al. 2022 (Orca, https://www.usenix.org/conference/osdi22/presentation/yu) over
on-demand or reserved blocks; the policies are in `scheduling/`. Knows no tensor, no model and no clock: the same class
runs in virtual time, and repeats a recorded run.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from pagegen.errors import ConfigError, RequestError
from pagegen.runtime.policies import Allocation, Demand, MemoryPolicy
from pagegen.runtime.scheduling import Limits, find_policy
from pagegen.runtime.scheduling.events import (
    Added,
    Branch,
    Ended,
    Finished,
    Measured,
    Pinned,
    Planned,
    Sampled,
    SchedulerEvent,
    Updated,
)
from pagegen.runtime.scheduling.plan import Iteration, ScheduledBatch, ScheduledSequence, Transfer, TransferKind
from pagegen.runtime.scheduling.pool import RequestPool, WaitReason
from pagegen.runtime.scheduling.preemption import Preemption, PreemptionCosts
from pagegen.runtime.sequence import FinishReason, GroupStatus, Request, Sequence, SequenceGroup

__all__ = [
    "DEFAULT_MAX_NUM_BATCHED_TOKENS",
    "DEFAULT_MAX_NUM_SEQS",
    "Preemption",
    "PreemptionCosts",
    "ScheduledBatch",
    "ScheduledSequence",
    "Scheduler",
    "SchedulerConfig",
    "Transfer",
    "TransferKind",
    "WaitReason",
]

DEFAULT_MAX_NUM_SEQS = 64
DEFAULT_MAX_NUM_BATCHED_TOKENS = 512


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`max_num_batched_tokens` bounds the tokens of one iteration, `max_num_seqs` the sequences that hold blocks.

    `policy` is a row of `scheduling.POLICIES`. `preemption` says how policies that preempt do it.
    """

    max_num_seqs: int = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: int = DEFAULT_MAX_NUM_BATCHED_TOKENS
    policy: str = "default"
    preemption: Preemption = Preemption.RECOMPUTE

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name}={value} schedules nothing; it must be at least 1")
        find_policy(self.policy)
        if self.preemption not in tuple(Preemption):
            raise ConfigError(f"preemption={self.preemption!r} is not known; allowed: {', '.join(Preemption)}")


class Scheduler:
    """Requests in, iterations out, one at a time: `schedule`, and `update` when it has been computed.

    All that it depends on comes in through `add`, `schedule`, `update`, `finish_sequence`, `end`, `pin`, `unpin` and the
    answers of `costs`, which says once, when it is first needed, what preemption costs on this machine. A `recorder` is
    told each of these as an event; `apply` takes the events of another run instead.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        memory: MemoryPolicy,
        *,
        costs: Callable[[], PreemptionCosts] | None = None,
        recorder: Callable[[SchedulerEvent], None] | None = None,
    ) -> None:
        self.config = config
        self.memory = memory
        limits = Limits(config.max_num_seqs, config.max_num_batched_tokens)
        self.policy = find_policy(config.policy)(limits, config.preemption)
        self.pool = RequestPool(memory, self.policy.preemption, self._measure)
        self.groups: dict[str, SequenceGroup] = {}  # that have not ended and left
        self.preemption_costs: PreemptionCosts | None = None
        self.num_deadlocks = 0
        self.head_waits_for: WaitReason | None = None
        self._costs = costs
        self._recorder = recorder
        self._num_arrivals = 0
        self._ended: list[Sequence] = []  # that keep their place
        self._released: list[Sequence] = []
        self._planned = ScheduledBatch()

    @property
    def running(self) -> list[SequenceGroup]:
        """By rank."""
        return self.pool.running

    @property
    def waiting(self) -> list[SequenceGroup]:
        """By rank; those that were preempted are among them."""
        return list(self.pool.waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.groups)

    @property
    def num_preemptions(self) -> int:
        return self.pool.num_preemptions

    def wait_reasons(self) -> dict[WaitReason, int]:
        """How many requests wait, and for what, as of the last iteration; O(1).

        Those that were preempted wait for what the first in line lacks; the others for that, or for the preempted.
        """
        num_waiting, num_preempted = len(self.pool.waiting), len(self.pool.preempted)
        if not num_waiting or self.head_waits_for is None:
            return {}
        if not num_preempted or num_preempted == num_waiting:
            return {self.head_waits_for: num_waiting}
        return {self.head_waits_for: num_preempted, WaitReason.PREEMPTED_FIRST: num_waiting - num_preempted}

    def wait_reason(self, request_id: str) -> WaitReason | None:
        """What one request waits for, None if it does not wait or has not been looked at."""
        group = self.groups.get(request_id)
        if group is None or group.status not in (GroupStatus.WAITING, GroupStatus.SWAPPED):
            return None
        ahead = self.pool.preempted and group not in self.pool.preempted
        return WaitReason.PREEMPTED_FIRST if ahead else self.head_waits_for

    # --- what comes in -----------------------------------------------------------------------------------------------

    def add(self, request: Request) -> SequenceGroup:
        """Queues a request. Raises RequestError for one that could not finish if it had everything to itself."""
        if request.request_id in self.groups:
            raise RequestError(f"request id {request.request_id!r} is in use; choose another", "request_id")
        self.policy.check(request)
        self._check_memory(request)
        self._record(Added(request))
        group = SequenceGroup(request, self.pool.new_seq_id(), self.policy.rank(request, self._num_arrivals))
        self._num_arrivals += 1
        self.groups[request.request_id] = group
        self.pool.waiting.push(group)
        return group

    def schedule(self) -> ScheduledBatch:
        """Plans one iteration and takes its blocks. `update` must follow if it has rows; it has none if there is no
        work, or if nothing could advance and one request was ended for that.
        """
        pool, config = self.pool, self.config
        iteration = Iteration(config.max_num_batched_tokens, config.max_num_seqs - pool.num_seqs, pool.transfers)
        self.head_waits_for = self.policy.plan(pool, iteration)
        if not iteration.rows and self.groups:
            self._break_deadlock()
        batch = self._planned = iteration.batch()
        pool.transfers = [] if batch.rows else list(batch.transfers)  # they run before the next rows
        self.memory.audit()
        if self._recorder:
            self._record(Planned(digest(batch)))
        return batch

    def update(self, batch: ScheduledBatch, sampled: SequenceOf[Sampled]) -> None:
        """Records that a batch was computed; `sampled[i]` is what row i gave: `num_samples` tokens.

        Rows whose sequence ended since `schedule` are skipped.
        """
        if self._recorder:
            self._record(Updated(tuple(sampled)))
        block_size = self.memory.block_size
        branches = dict[SequenceGroup, list[tuple[Sequence, Branch]]]()
        for (sequence, start, num_tokens), token in zip(batch.rows, sampled, strict=True):
            if sequence.finish_reason is not None:
                continue
            computed = sequence.num_computed_tokens = start + num_tokens
            group, token_ids = sequence.group, sequence.token_ids
            request = group.request
            if computed % block_size < num_tokens and not request.score_prompt:  # a block is full
                self.memory.commit(sequence.seq_id, token_ids, computed)
            if isinstance(token, int):
                group.decoding = True
                token_ids.append(token)
                if token in request.stop_token_ids or len(token_ids) >= request.max_num_tokens:
                    self._end_by(token, sequence, group)
            elif token is None:
                self._settle(group)
            elif isinstance(token, Branch):
                branches.setdefault(group, []).append((sequence, token))
            else:
                self._fork(sequence, token)
        for group, moves in branches.items():  # once the parents are known to be computed
            self.pool.branch(group, moves)
            for beam, branch in moves:
                self._end_by(branch.token_id, beam, group)
        self._release()

    def finish_sequence(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends one sequence of a request; one that has ended keeps its first reason."""
        if sequence.finished:
            return
        self._record(Finished(sequence.group.request_id, sequence.index, reason))
        sequence.group.end(sequence, reason)
        self._ended.append(sequence)
        self._release()

    def end(self, request_id: str, reason: FinishReason, error: str | None = None) -> bool:
        """Ends a request wherever it stands and frees all that it holds; False if there is none of that id."""
        group = self.groups.get(request_id)
        if group is None:
            return False
        self._record(Ended(request_id, reason, error))
        self._end_group(group, reason, error)
        self._release()
        return True

    def pin(self, token_ids: SequenceOf[int], salt: str = "") -> None:
        """Keeps a prefix's full blocks from eviction, from when a request has computed them until `unpin`.

        Requests that have not begun and will never fit beside it end with that reason. Raises ConfigError, and pins
        nothing, where nothing is cached or where a request that has begun could not finish any more.
        """
        pool, tokens = self.pool, tuple(token_ids)
        if not self.policy.prefix_cache:  # those that promise blocks ahead do not count pinned ones
            raise ConfigError(f"policy {self.policy.name} goes without a prefix cache, so nothing can be pinned; use policy default")
        self.memory.pin(tokens, salt)
        never = [group for group in pool.waiting if pool.never_fits(group)]
        begun = [f"request {group.request_id!r}" for group in never if group in pool.preempted]
        if self.memory.can_allocate(Demand(tokens, len(tokens), salt=salt)) is Allocation.NEVER:
            begun.append("whoever is to compute it")
        if begun:
            pinned = self.memory.num_pinned_blocks
            self.memory.unpin(tokens, salt)
            raise ConfigError(
                f"pinning {len(tokens)} tokens would keep {pinned} of {self.memory.num_blocks} KV blocks, too many for "
                f"{begun[0]}; pin a shorter prefix or give the engine more KV memory"
            )
        self._record(Pinned(tokens, salt))
        for group in never:
            error = (
                f"request {group.request_id!r}: a prefix was pinned while it waited, and {self.memory.num_pinned_blocks} "
                f"pinned of {self.memory.num_blocks} KV blocks leave too few for it; unpin a prefix, shorten the prompt, "
                "lower max_tokens, or give the engine more KV memory"
            )
            self._end_group(group, FinishReason.ERROR, error)

    def unpin(self, token_ids: SequenceOf[int], salt: str = "") -> None:
        """Takes one `pin` of the same prefix back. Raises ConfigError if there is none."""
        self.memory.unpin(tuple(token_ids), salt)
        self._record(Pinned(tuple(token_ids), salt, keep=False))

    def take_released(self) -> list[Sequence]:
        """The sequences that have ended and left since this was last called."""
        released, self._released = self._released, []
        return released

    def apply(self, event: SchedulerEvent) -> ScheduledBatch | None:
        """Repeats an event of another run; gives what was planned, for Planned. Raises RuntimeError if this scheduler
        plans otherwise than that one did.
        """
        match event:
            case Added():
                self.add(event.request)
            case Planned():
                batch = self.schedule()
                if digest(batch) != event.digest:
                    raise RuntimeError("the repeated run plans another iteration than the recorded one did")
                return batch
            case Updated():
                self.update(self._planned, event.sampled)
            case Finished():
                self.finish_sequence(self.groups[event.request_id].sequences[event.index], event.reason)
            case Ended():
                self.end(event.request_id, event.reason, event.error)
            case Pinned():
                (self.pin if event.keep else self.unpin)(event.token_ids, event.salt)
            case Measured():
                self.preemption_costs = event.costs
        return None

    # --- inside ------------------------------------------------------------------------------------------------------

    def _record(self, event: SchedulerEvent) -> None:
        if self._recorder:
            self._recorder(event)

    def _measure(self) -> PreemptionCosts | None:
        if self.preemption_costs is None and self._costs is not None:
            self.preemption_costs = self._costs()
            self._record(Measured(self.preemption_costs))
        return self.preemption_costs

    def _check_memory(self, request: Request) -> None:
        memory = self.memory
        final = request.final_num_tokens
        demand = Demand(
            request.prompt_token_ids,
            request.max_num_tokens - 1,
            None if final is None else final - 1,
            request.salt,
            num_sequences=request.num_sequences,
        )
        if memory.can_allocate(demand) is Allocation.NEVER:
            prompt_len, needed = len(request.prompt_token_ids), memory.blocks_needed(demand)
            several = f" for each of {request.num_sequences} sequences" if request.num_sequences > 1 else ""
            but = (
                "" if needed > memory.num_blocks else ", which pinned prefixes or the rounding of runs leave too few of"
            )
            raise RequestError(
                f"request {request.request_id!r}: {prompt_len} prompt tokens and up to "
                f"{request.max_num_tokens - prompt_len} new ones{several} need {needed} KV blocks, the pool has "
                f"{memory.num_blocks} of {memory.block_size} tokens{but}; shorten the prompt, lower max_tokens, or give "
                "the engine more KV memory"
            )

    def _end_by(self, token_id: int, sequence: Sequence, group: SequenceGroup) -> None:
        """Ends a sequence if its newest token says so."""
        request = group.request
        if token_id in request.stop_token_ids:
            reason = FinishReason.STOP
        elif len(sequence.token_ids) >= request.max_num_tokens:
            reason = FinishReason.LENGTH
        else:
            return
        group.end(sequence, reason)
        self._ended.append(sequence)

    def _fork(self, parent: Sequence, token_ids: tuple[int, ...]) -> None:
        """The prompt is computed: every sequence of the group gets its first token."""
        group = parent.group
        group.sequences += [self.pool.fork(parent, index) for index in range(1, len(token_ids))]
        group.forked = group.decoding = True
        for sequence, token_id in zip(tuple(group.sequences), token_ids, strict=True):
            sequence.token_ids.append(token_id)
            self._end_by(token_id, sequence, group)

    def _settle(self, group: SequenceGroup) -> None:
        """Lets a recovering group go on when its active sequences are computed as far as they have to be."""
        while group.recovering and all(s.num_computed_tokens >= group.end_of(s) for s in group.active):
            if group.active is group.live:
                group.recovering, group.decoding = False, True
            else:
                self.pool.fork_again(group)

    def _end_group(self, group: SequenceGroup, reason: FinishReason, error: str | None) -> None:
        """Ends all that live of a group, and frees all that it holds at once, whatever the policy holds back."""
        for sequence in tuple(group.live):
            group.end(sequence, reason, error)
            self._ended.append(sequence)
        mine = [sequence for sequence in self._ended if sequence.group is group]
        self._ended = [sequence for sequence in self._ended if sequence.group is not group]
        self._leave(mine)

    def _release(self) -> None:
        if self._ended and not self.policy.holds(self.pool):
            ended, self._ended = self._ended, []
            self._leave(ended)

    def _leave(self, sequences: list[Sequence]) -> None:
        gone = set()
        for sequence in sequences:
            self.memory.free(sequence.seq_id)
            if not sequence.group.live:
                gone.add(sequence.group)
        self._released += sequences
        for group in gone:
            del self.groups[group.request_id]
        self.pool.remove(gone)

    def _break_deadlock(self) -> None:
        """Nothing can advance: the last of those that run, or the first that waits, ends with an error."""
        pool, memory = self.pool, self.memory
        live = [group for group in pool.running if group.live]
        group = live[-1] if live else pool.waiting.head
        if group is None:
            return
        self.num_deadlocks += 1
        error = (
            f"request {group.request_id!r}: nothing can advance with {memory.num_free_blocks} of {memory.num_blocks} KV "
            f"blocks free, {len(live)} requests running and preemption {pool.preemption}; allow preemption, lower "
            "max_num_seqs, or give the engine more KV memory"
        )
        self._end_group(group, FinishReason.ERROR, error)


def digest(batch: ScheduledBatch) -> str:
    """What a batch schedules, moves and preempts, in 16 hexadecimal digits."""
    rows = [(row.sequence.seq_id, row.start, row.num_tokens) for row in batch.rows]
    preempted = [group.request_id for group in batch.preempted]
    moved = [(str(transfer.kind), transfer.pairs) for transfer in batch.transfers]
    return hashlib.blake2b(repr((rows, moved, preempted)).encode(), digest_size=8).hexdigest()
