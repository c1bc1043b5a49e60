"""The command line: `autopar demo | plan | show | explain | export | simulate | verify | profile | calibrate | ...`."""

from autopar.cli.commands import main

__all__ = ["main"]
