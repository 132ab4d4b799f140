"""python -m octavo."""

from octavo_cli import main

main()
