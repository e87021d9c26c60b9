"""Commit: where the accepted path goes in the KV caches."""
