"""Scheduling policies by name, and what they work with."""

from __future__ import annotations

from pagegen.errors import ConfigError
from pagegen.runtime.scheduling.base import Limits, SchedulingPolicy
from pagegen.runtime.scheduling.default import DefaultPolicy
from pagegen.runtime.scheduling.orca import OrcaPolicy
from pagegen.runtime.scheduling.request import RequestLevelPolicy
from pagegen.runtime.scheduling.vllm_paper import VllmPaperPolicy

POLICIES: dict[str, type[SchedulingPolicy]] = {
    policy.name: policy for policy in (DefaultPolicy, VllmPaperPolicy, OrcaPolicy, RequestLevelPolicy)
}


def find_policy(name: str) -> type[SchedulingPolicy]:
    """The policy of that name. Raises ConfigError."""
    if name not in POLICIES:
        raise ConfigError(f"policy {name!r} is not known; allowed: {', '.join(POLICIES)}")
    return POLICIES[name]


__all__ = ["POLICIES", "Limits", "SchedulingPolicy", "find_policy"]
