"""`attnkit-experiments`: the command line, or what to install for it."""

import sys


def main() -> int:
    """Run the command line; exit status 2 without its packages."""
    try:
        from attnkit_experiments.__main__ import main as command
    except ModuleNotFoundError as error:
        extra = "pip install 'attnkit[experiments]'"
        print(f"error: experiments need {error.name}, which is not installed: {extra}", file=sys.stderr)
        return 2
    return command()
