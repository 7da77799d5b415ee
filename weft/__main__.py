"""Run the command ``weft``, also as ``python -m weft`` and ``torchrun -m weft``."""

import sys


def main() -> int:
    """Run the command line; return the exit status."""
    try:
        from weft.cli.main import main as run_command
    except KeyboardInterrupt:  # the imports take a good part of a second
        print("\ninterrupted", file=sys.stderr)
        return 130
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
