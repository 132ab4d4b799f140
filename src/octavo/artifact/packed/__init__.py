"""The packed folder: its schemes, its layouts, and a reader."""
