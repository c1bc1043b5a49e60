"""The command line: `autopar demo | plan | show | explain | verify | rules`."""

from autopar.cli.commands import main

__all__ = ["main"]
