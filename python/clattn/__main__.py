"""The command line: ``python -m clattn``."""

import sys

from clattn._commands.main import run

if __name__ == "__main__":
    sys.exit(run())
