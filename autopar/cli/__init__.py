"""The command line: `autopar demo | plan | show | explain | export | simulate | verify | profile | rules`."""

from autopar.cli.commands import main

__all__ = ["main"]
