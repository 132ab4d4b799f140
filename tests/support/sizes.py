"""The size of the project in lines and files: `make size` prints it, and tests/test_architecture.py holds it."""

from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
LONGEST, SHORT = 600, 60  # lines of a file
KERNELS = ROOT / "src" / "octavo" / "ops" / "kernels"
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def sources(folder: str) -> dict[Path, int]:
    """The lines of each Python file below a folder of the repository."""
    return {path: lines(path) for path in sorted((ROOT / folder).rglob("*.py"))}


def too_long(files: dict[Path, int]) -> list[Path]:
    return [path for path, count in files.items() if count > LONGEST and path.parent != KERNELS]


def short(files: dict[Path, int]) -> list[Path]:
    return [path for path, count in files.items() if count < SHORT and path.name != "__init__.py"]


def main() -> None:
    print(f"{'':8}{'lines':>8}{'files':>7}{'median':>8}{f'over {LONGEST}':>10}{f'under {SHORT}':>10}")
    for folder in ("src", "tests", "bench"):
        files = sources(folder)
        middle = int(median(files.values()))
        counts = f"{len(files):7,}{middle:8,}{len(too_long(files)):10,}{len(short(files)):10,}"
        print(f"{folder:8}{sum(files.values()):8,}{counts}")
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in PAGES)]
    print(f"{'docs':8}{sum(map(lines, pages)):8,}{len(pages):7,}  with {', '.join(PAGES)}")


if __name__ == "__main__":
    main()
