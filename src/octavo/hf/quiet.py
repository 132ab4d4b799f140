"""transformers without its progress bars and messages, for work that reports its own progress."""

from collections.abc import Iterator
from contextlib import contextmanager

from octavo.extras import import_extra


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide the progress bars and all messages but errors. Both are as before when the block ends."""
    logging = import_extra("transformers.utils.logging", "hf", "the models here are those of transformers")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
