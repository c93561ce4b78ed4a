"""Carries a plan out: computes the output's bytes, keeps a resumable workspace, and publishes the result."""
