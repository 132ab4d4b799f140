"""Checking a packed folder against its model and against an independent reference."""

from octavo.verification.pipeline import verify

__all__ = ["verify"]
