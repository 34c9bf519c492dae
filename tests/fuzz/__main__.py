"""`python -m tests.fuzz`: worker processes import the campaign by its own name."""

import sys

from tests.fuzz.campaign import main

if __name__ == "__main__":
    sys.exit(main())
