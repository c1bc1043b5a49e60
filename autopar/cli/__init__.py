"""The command line: `autopar demo | plan | show | explain | export | simulate | verify | profile | calibrate | ...`.

In: arguments (`options` turns them into what the Python functions take). Out: text or, with `--json`, one JSON document
(`output`). Each command is a few lines over a function that Python has, too; `commands` lists them.
"""

from autopar.cli.commands import main

__all__ = ["main"]
