"""python -m octavo_cli: the command `octavo`."""

from octavo_cli import main

if __name__ == "__main__":  # not in a process that vLLM starts
    main()
