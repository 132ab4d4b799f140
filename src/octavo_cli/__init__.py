"""The command `octavo`: one thin file a command.

This package stands beside `octavo` and not inside it: `import octavo` imports PyTorch, which takes seconds, and
`octavo --help` or a typing mistake is answered without it. So the files here import `octavo` and `torch` inside
functions only, and `octavo` never imports this package.
"""

import sys


def main() -> None:
    """Run the command line. An error that the user can mend is one message and exit code 1; Ctrl-C is exit code 130."""
    try:
        from octavo_cli.app import run  # here, so that Ctrl-C during this import is handled too

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
