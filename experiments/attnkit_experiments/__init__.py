"""Training studies of attention variants on torch: ``python -m experiments list | run | report``."""

import sys

__version__ = "0.1.0"


def main() -> int:
    """`attnkit-experiments`: the command line, or exit status 2 and what to install for it."""
    try:
        from attnkit_experiments.__main__ import main as command
    except ModuleNotFoundError as error:
        extra = "pip install attnkit-experiments"
        print(f"error: experiments need {error.name}, which is not installed: {extra}", file=sys.stderr)
        return 2
    return command()
