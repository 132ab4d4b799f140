"""A document: a text file, a row of a data set, or a conversation that a chat template wrote out as text."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

ROW_FIELDS = ("text", "prompt", "messages")

Chat = Callable[[Any], str]  # a chat template: from messages, [{"role": ..., "content": ...}, ...], to text


class DataError(ValueError):
    """Data that is missing, malformed or too short; the message names the source, and the line where there is one."""


@dataclass(frozen=True)
class Document:
    """A piece of text that is read as a whole.

    Attributes:
        text: the content; it holds more than white space.
        kind: "text" is a whole file. "row" is one row of a data set. "chat" is a conversation, whose text already
            holds the special tokens of the model.
    """

    text: str
    kind: Literal["text", "row", "chat"]


def chat_of(tokenizer: Any) -> Chat | None:
    """The chat template of a transformers tokenizer, as a function; None if the tokenizer has no template."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    return partial(tokenizer.apply_chat_template, tokenize=False)


def document_of_value(value: Any, field: str, where: str, chat: Chat | None) -> Document | None:
    """The document that the value of a row's `field` holds; None if the value holds no text.

    Raises:
        DataError: the value is neither a string nor a conversation, holds half a surrogate pair (JSON can spell one,
            UTF-8 cannot), or is a conversation that `chat` is missing for or refuses.
    """
    if field == "messages" or isinstance(value, list):
        document = Document(_write_conversation(value, field, where, chat), "chat")
    elif isinstance(value, str):
        document = Document(value, "row")
    else:
        raise DataError(f"{where}: {field} must be a string, got {type(value).__name__}")
    try:
        document.text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {field} must be text; character {error.start} is half a surrogate pair") from error
    return document if document.text.strip() else None


def _write_conversation(messages: Any, field: str, where: str, chat: Chat | None) -> str:
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages
    ):
        raise DataError(f'{where}: {field} must be a list of objects with "role" and "content"')
    if chat is None:
        raise DataError(
            f"{where}: a conversation needs the tokenizer's chat template, and this tokenizer has none: use a Hugging "
            "Face model that was trained to chat, or give rows with text"
        )
    if not messages:
        return ""
    try:
        return chat(messages)
    except Exception as error:  # A chat template is a program of the model's author, and can raise any exception.
        raise DataError(f"{where}: the chat template does not take these messages ({error})") from error
