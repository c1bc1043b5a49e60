"""The commands. Exit codes: 0 ok, 2 bad usage or input, 3 no plan fits, 4 verification failed, 130 interrupted.

With `--json` stdout holds exactly one JSON document (also for errors); logs and progress go to stderr.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from autopar.cli.lazy_group import CommandEntry, LazyGroup
from autopar.cli.output import print_document
from autopar.errors import AutoparError, InfeasibleError, VerificationError

EXIT_USAGE, EXIT_INFEASIBLE, EXIT_VERIFICATION, EXIT_INTERRUPTED = 2, 3, 4, 130
INTERRUPTED = "interrupted: there was no plan yet, and nothing is written"

COMMANDS = (
    CommandEntry("cache", "cache_command", "cache", "List measured profiles of this machine, or delete them."),
    CommandEntry("calibrate", "calibrate_command", "calibrate", "Refit a cluster from a run that logged its steps."),
    CommandEntry("demo", "demo_command", "demo", "Plan a GPT for 2x8 H100, then train one on four local processes."),
    CommandEntry("diff", "diff_command", "diff", "Compare two plan files."),
    CommandEntry("doctor", "doctor_command", "doctor", "Say what this machine can do, and how to mend what it cannot."),
    CommandEntry("edit", "question_commands", "edit", "Change placements of a plan file, complete and price it again."),
    CommandEntry("explain", "question_commands", "explain", "Say why a tensor lies as it does, or where plans part."),
    CommandEntry("export", "export_command", "export", "Write a plan as the nearest configuration of another tool."),
    CommandEntry("import", "import_command", "import_", "Plan a model with another tool's configuration."),
    CommandEntry("memory", "question_commands", "memory", "Say where the memory of the fullest moment of a step goes."),
    CommandEntry("plan", "plan_command", "plan", "Plan a model for a cluster."),
    CommandEntry("profile", "profile_command", "profile", "Measure this machine, or a job under torchrun."),
    CommandEntry("report", "report_command", "report", "Write a plan as one HTML page that opens from disk."),
    CommandEntry("rules", "rule_commands", "rules", "Look up and propose sharding rules, see what is missing."),
    CommandEntry("run", "run_command", "run", "Run a training script under torchrun with a plan."),
    CommandEntry("show", "show_command", "show", "Print a plan file, or the program of one rank."),
    CommandEntry("simulate", "simulate_command", "simulate", "Play one step of a plan file, and write it as a trace."),
    CommandEntry("verify", "verify_command", "verify", "Compare a model on local processes with the plain model."),
    CommandEntry("what-if", "question_commands", "what_if", "Plan the model of a plan file again under other wishes."),
)
"""Every command with its line in `autopar --help` and where it is defined; its module is loaded when it is called."""


@click.group(cls=LazyGroup, entries=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="autopar")
def commands() -> None:
    """Plan how a PyTorch model is split over a cluster, prove the plan optimal, and run it."""


def exit_code(error: AutoparError) -> int:
    """3 where nothing fits, 4 where results differ, else 2."""
    if isinstance(error, InfeasibleError):
        return EXIT_INFEASIBLE
    return EXIT_VERIFICATION if isinstance(error, VerificationError) else EXIT_USAGE


def log_to_stderr() -> None:
    """Phases of autopar as plain lines on stderr."""
    logger = logging.getLogger("autopar")
    if not logger.handlers:
        logger.addHandler(logging.StreamHandler())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `autopar` script. Always exits."""
    log_to_stderr()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        sys.exit(commands.main(args=words, prog_name="autopar", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        _leave(words, "UsageError", error.format_message(), EXIT_USAGE)
    except click.Abort:
        click.echo(INTERRUPTED, err=True)
        _leave(words, "Interrupted", INTERRUPTED, EXIT_INTERRUPTED)
    except AutoparError as error:
        name = public_name(error)
        click.echo(f"{name}: {error}", err=True)
        _leave(words, name, str(error), exit_code(error))
    except OSError as error:
        if error.filename is None:
            raise
        message = f"{error.filename}: {error.strerror}"
        click.echo(f"FileError: {message}", err=True)
        _leave(words, "FileError", message, EXIT_USAGE)


def _leave(words: Sequence[str], name: str, message: str, code: int) -> NoReturn:
    """Exit with a code; with `--json` the error is the document."""
    own = words[: words.index("--")] if "--" in words else words
    if "--json" in own:
        print_document({"error": {"type": name, "message": message}})
    sys.exit(code)


def public_name(error: AutoparError) -> str:
    """The class of `autopar.errors` that a user would catch: an InfeasibleError of the planner has one of its own."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == AutoparError.__module__)
