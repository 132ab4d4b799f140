"""Check a packed folder against the model that it was packed from, and its readers against an independent reference."""

from octavo.verification.verifier import verify

__all__ = ["verify"]
