"""What pyproject.toml cannot say: the links of README lead into the repository, and are absolute on the index page."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
REPOSITORY = "github.com/OWNER/octavo"


def with_absolute_links(text: str) -> str:
    """`text` with its relative links made absolute; a picture's leads to the file itself."""
    raw = REPOSITORY.replace("github.com", "raw.githubusercontent.com")
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\1https://{raw}/main/", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?:|#)", rf"\1https://{REPOSITORY}/blob/main/", text)


if __name__ == "__main__":
    setup(
        long_description=with_absolute_links((ROOT / "README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
    )
