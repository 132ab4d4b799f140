"""python -m octavo_cli: the command `octavo`."""

from octavo_cli import main

main()
