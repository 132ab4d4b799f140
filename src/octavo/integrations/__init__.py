"""Octavo in other training libraries. Each module imports the library whose name it has."""
