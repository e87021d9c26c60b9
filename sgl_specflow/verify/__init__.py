"""Acceptance: which path of a verified tree is committed."""
