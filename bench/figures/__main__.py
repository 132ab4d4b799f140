"""Draw the pictures of docs/concepts and docs/learn: a part of `make docs`.

python -m bench.figures            the SVG files of the repository
python -m bench.figures FOLDER     the same as PNG files, in the light colours
"""

import sys
from pathlib import Path

from bench.figures import formats, products
from bench.figures.style import Draw, save

FOLDER = Path(__file__).parents[2] / "docs" / "figures"
FIGURES: tuple[Draw, ...] = (
    formats.number_line,
    formats.range_and_precision,
    formats.scaling,
    formats.granularity,
    products.one_quantization,
    products.accumulation,
    formats.rounding,
    formats.rotation,
    formats.loss_scaling,
)


def main(folder: Path, suffix: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for draw in FIGURES:
        save(draw, folder / f"{draw.__name__}{suffix}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), ".png")
    else:
        main(FOLDER, ".svg")
