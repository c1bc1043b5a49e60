"""The command line: `autopar demo | plan | show | explain | verify`."""

from autopar.cli.commands import main

__all__ = ["main"]
