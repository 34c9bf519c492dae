"""`python -m revcompile` is the command line."""

import sys

from revcompile.cli import main

if __name__ == "__main__":
    sys.exit(main())
