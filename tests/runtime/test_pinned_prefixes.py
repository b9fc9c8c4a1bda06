"""Claims about pinned prefixes: computed once, kept until unpinned, and counted by whoever admits."""

from __future__ import annotations

import dataclasses
import json

import pytest

from pagegen.errors import ConfigError, RequestError
from pagegen.runtime.engine import Engine, RequestOutput
from pagegen.runtime.policies import make_memory_policy
from pagegen.runtime.scheduler import Scheduler
from pagegen.runtime.scheduling.events import Pinned, SchedulerEvent
from pagegen.runtime.sequence import FinishReason
from pagegen.runtime.simulation.log import decode, encode
from tests.runtime.engine_rig import GREEDY, make_engine

PREFIX = list(range(97, 97 + 9))  # two full blocks of 4, and a token


def run(engine: Engine) -> dict[str, RequestOutput]:
    """The last output of each request; the pool keeps what is pinned and nothing else."""
    done: dict[str, RequestOutput] = {}
    while engine.has_work:
        done |= {output.request_id: output for output in engine.step() if output.finish_reason}
        engine.memory.audit(full=True)
    return done


def cached_tokens(engine: Engine, prompt: list[int], salt: str = "") -> int:
    engine.add_request("r", prompt, GREEDY, cache_salt=salt)
    usage = run(engine)["r"].usage
    assert usage
    return usage.cached_tokens


def fill(engine: Engine) -> None:
    """Takes every block that is free, so that whatever may be evicted is."""
    for i in range(3):
        length = 4 * (engine.memory.num_blocks - engine.stats().num_pinned_blocks) - GREEDY.max_tokens + 1
        engine.add_request("fill", [i] * min(length, 50), GREEDY)
        run(engine)


def test_a_pinned_prefix_is_computed_once_and_outlives_every_pressure() -> None:
    engine = make_engine(num_blocks=12)
    engine.pin_prefix(PREFIX)
    assert run(engine) == {}, "who pins hears of nothing"
    stats = engine.stats()
    assert (stats.num_pinned_blocks, stats.num_used_blocks, stats.num_computed_tokens) == (2, 2, 9)
    for _ in range(2):
        fill(engine)
        assert cached_tokens(engine, [*PREFIX, 5]) == 8
    engine.unpin_prefix(PREFIX)
    assert engine.stats().num_pinned_blocks == engine.stats().num_used_blocks == 0
    fill(engine)
    assert cached_tokens(engine, [*PREFIX, 5]) == 0


def test_a_pin_is_for_its_salt_and_counted_as_often_as_it_was_made() -> None:
    engine = make_engine(num_blocks=16)
    for salt in ("", "mine", "mine"):
        engine.pin_prefix(PREFIX, cache_salt=salt)
    run(engine)
    assert engine.stats().num_pinned_blocks == 4
    engine.unpin_prefix(PREFIX, cache_salt="mine")
    fill(engine)
    assert [cached_tokens(engine, [*PREFIX, 5], salt) for salt in ("", "mine", "other")] == [8, 8, 0]
    engine.unpin_prefix(PREFIX, cache_salt="mine")
    with pytest.raises(ConfigError, match="no prefix of these 9 tokens is pinned"):
        engine.unpin_prefix(PREFIX, cache_salt="mine")


def test_who_waits_and_will_never_fit_beside_a_pin_ends_with_that_reason() -> None:
    engine = make_engine(num_blocks=8, max_num_seqs=1)
    engine.add_request("runs", [1, 2, 3], GREEDY)
    engine.step()
    engine.add_request("large", [4] * 22, GREEDY)  # 7 blocks
    engine.add_request("small", [5] * 8, GREEDY)
    engine.pin_prefix(PREFIX)
    done = run(engine)
    assert done["large"].finish_reason is FinishReason.ERROR
    assert "a prefix was pinned while it waited, and 2 pinned of 8 KV blocks" in (done["large"].error or "")
    assert done["runs"].error is done["small"].error is None
    with pytest.raises(RequestError, match="need 7 KV blocks, the pool has 8 of 4 tokens, which pinned prefixes"):
        engine.add_request("large", [4] * 22, GREEDY)
    engine.unpin_prefix(PREFIX)
    engine.add_request("large", [4] * 22, GREEDY)
    assert run(engine)["large"].error is None


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_pin_that_a_request_at_work_could_not_finish_beside_is_refused(preemption: str) -> None:
    """Wherever that request's blocks are: on the device, on the host, or lost."""
    engine = make_engine(num_blocks=9, preemption=preemption)
    for i in range(2):
        engine.add_request(str(i), [i] * 12, dataclasses.replace(GREEDY, max_tokens=18))  # up to 8 blocks
    engine.step()
    while not engine.stats().num_preemptions:
        for prefix in (PREFIX, [0] * 8, [1] * 8):
            with pytest.raises(ConfigError, match="pin a shorter prefix"):
                engine.pin_prefix(prefix)
        engine.step()
    with pytest.raises(ConfigError, match="pin a shorter prefix"):
        engine.pin_prefix(PREFIX)
    assert engine.stats().num_pinned_blocks == 0
    assert all(output.error is None for output in run(engine).values())


def test_what_cannot_be_kept_is_refused_and_nothing_stays_behind() -> None:
    engine = make_engine(num_blocks=9)
    with pytest.raises(ConfigError, match="would keep 5 of 9 KV blocks, too many for whoever is to compute it"):
        engine.pin_prefix(list(range(20)))
    with pytest.raises(RequestError, match="no tokens"):
        engine.pin_prefix([])
    with pytest.raises(ConfigError, match="needs the prefix cache"):
        make_engine(prefix_cache=False).pin_prefix(PREFIX)
    with pytest.raises(ConfigError, match="choose memory policy 'paged'"):
        make_engine(num_blocks=64, memory_policy="orca-max", max_model_len=32).pin_prefix(PREFIX)
    assert not engine.has_work and engine.stats().num_pinned_blocks == engine.stats().num_used_blocks == 0


def test_a_recorded_run_repeats_its_pins() -> None:
    log: list[SchedulerEvent] = []
    engine = make_engine(num_blocks=10, max_num_seqs=2, recorder=log.append)
    engine.add_request("never", [4] * 30, GREEDY)
    engine.pin_prefix(PREFIX)
    for i in range(4):
        engine.add_request(str(i), [*PREFIX, i], GREEDY)
    assert run(engine)["never"].error
    engine.unpin_prefix(PREFIX)
    fill(engine)
    assert [event.keep for event in log if isinstance(event, Pinned)] == [True, False]
    scheduler = Scheduler(engine.scheduler.config, make_memory_policy("paged", 10, 4, max_model_len=64))
    for event in log:
        scheduler.apply(decode(json.loads(json.dumps(encode(event)))))
    assert not scheduler.has_work and scheduler.memory.num_used_blocks == 0
