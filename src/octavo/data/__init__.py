"""Reading text: one reader for training, calibration, packing within a budget, and verification."""

from octavo.data.reading import Chat, DataError, Document, Reading, ReadReport, absolute_source, chat_of, read_text

__all__ = ["Chat", "DataError", "Document", "ReadReport", "Reading", "absolute_source", "chat_of", "read_text"]
