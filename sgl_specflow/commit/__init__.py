"""Commit: where the accepted path goes in the KV caches."""

from .compaction import CommitPlan, move_rows, plan_commit

__all__ = ["CommitPlan", "move_rows", "plan_commit"]
