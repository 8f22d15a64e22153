"""`python -m experiments`, from the root of the repository: the command line of `attnkit_experiments`."""

import sys

from attnkit_experiments.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
