"""Reading text: one reader for training, calibration, packing within a budget, and verification."""

from octavo.text.document import Chat, DataError, Document, chat_of
from octavo.text.read import Reading, read_text
from octavo.text.report import ReadReport
from octavo.text.sources import absolute_source

__all__ = ["Chat", "DataError", "Document", "ReadReport", "Reading", "absolute_source", "chat_of", "read_text"]
