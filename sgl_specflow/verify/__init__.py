"""Acceptance: which path of a verified tree is committed."""

from .acceptance import Accepted, accept

__all__ = ["Accepted", "accept"]
