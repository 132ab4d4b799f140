"""python -m octavo."""

from octavo.cli import main

main()
