"""The command lines of benchmarks."""

import argparse
import os
from pathlib import Path


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help shows the head of a benchmark's file as it is written."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)


def with_assets(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Returns the arguments, with the folder of models and data, which has to be named."""
    parser.add_argument("--assets", type=Path, default=os.environ.get("FEDLEAK_ASSETS"))
    args = parser.parse_args()
    if args.assets is None:
        parser.error("say where models and data are: --assets, or FEDLEAK_ASSETS")
    return args
