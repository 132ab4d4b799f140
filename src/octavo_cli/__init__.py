"""The command `octavo`: one thin file a command.

`octavo --help` or a typing mistake is answered without PyTorch, whose import takes seconds. So the files here import
what needs it inside functions only: `octavo.util`, `octavo.data` and `octavo.version` do not. `octavo` never
imports this package.
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
