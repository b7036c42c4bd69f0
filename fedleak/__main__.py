"""`python -m fedleak` is `fedleak`."""

import sys


def main() -> None:
    """Calls the command line, or says what to install if only the tap is installed."""
    try:
        from fedleak.cli import app

        app(prog_name="fedleak")
    except ModuleNotFoundError as error:
        if str(error.name).startswith("fedleak"):
            raise
        sys.exit(
            f"fedleak: {error.name} is not installed; without it this installation can only tap: "
            "install 'fedleak[audit]'"
        )


if __name__ == "__main__":
    main()
