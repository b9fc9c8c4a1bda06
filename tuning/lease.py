"""Proof of life of the processes that share a study, on any storage and on any number of machines.

Who evaluates a trial renews a lease in its attributes from a thread of its own. A lease holds no deadline, since clocks
of two machines disagree: it has lapsed for an observer that saw it unchanged over LAPSED_BEATS beats of its own. Beats
that an observer slept through do not count, so one that was stopped and goes on takes nothing from who was stopped with it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

LEASE = "lease"  # the trial's attribute; a running trial without one is still being chosen
BEAT_SECONDS = 3.0  # between two renewals
LAPSED_BEATS = 7  # without a renewal, and the trial is another's to try


class Heartbeat:
    """Renews the leases of this process's trials in a study, and watches those of others. To be closed."""

    def __init__(self, study: optuna.Study, seconds: float = BEAT_SECONDS) -> None:
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"
        self.seconds = seconds
        self._study, self._storage = study, study._storage
        self._guard = threading.Lock()
        self._held: dict[int, int] = {}  # trial id -> beats so far
        self._unchanged: Mapping[int, tuple[object, int]] = {}  # trial number -> its lease, beats that it stayed as it is
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def hold(self, trial_id: int) -> None:
        """Takes a running trial and keeps it until `drop`. Raises UpdateFinishedTrialError if somebody ended it."""
        self._renew(trial_id, 0)
        with self._guard:
            self._held[trial_id] = 0

    def drop(self, trial_id: int) -> None:
        """Ends the renewals of a trial."""
        with self._guard:
            self._held.pop(trial_id, None)

    def has_lapsed(self, trial: FrozenTrial) -> bool:
        """Whether nobody gave a sign of life for a running trial for as long as it takes."""
        lease, beats = self._unchanged.get(trial.number, (None, 0))
        return beats >= LAPSED_BEATS and lease == trial.user_attrs.get(LEASE)

    def is_foreign(self, trial: FrozenTrial) -> bool:
        """Whether a running trial is not this process's."""
        return holder(trial) != self.owner

    def close(self) -> None:
        """Ends the thread; leases still held lapse."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self.seconds):
            try:
                self._beat()
            except (OSError, StorageInternalError):  # out of reach: the next beat may find it
                continue

    def _beat(self) -> None:
        with self._guard:
            held = dict(self._held)
        for trial_id, beats in held.items():
            try:
                self._renew(trial_id, beats + 1)
            except UpdateFinishedTrialError:
                self.drop(trial_id)
                continue
            with self._guard:
                if trial_id in self._held:
                    self._held[trial_id] = beats + 1
        now: dict[int, tuple[object, int]] = {}
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            lease = trial.user_attrs.get(LEASE)
            before, beats = self._unchanged.get(trial.number, (lease, -1))
            now[trial.number] = (lease, beats + 1 if lease == before else 0)
        self._unchanged = now

    def _renew(self, trial_id: int, beats: int) -> None:
        lease: dict[str, Any] = {"owner": self.owner, "beat": beats, "time": round(time.time(), 3)}
        self._storage.set_trial_user_attr(trial_id, LEASE, lease)


def holder(trial: FrozenTrial) -> str:
    """Who evaluates a running trial, as `host:process:token`; "" while it is being chosen."""
    lease = trial.user_attrs.get(LEASE)
    return str(lease.get("owner", "")) if isinstance(lease, Mapping) else ""
