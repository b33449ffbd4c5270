"""The command line: thin, and torch is imported only inside the commands that train."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from typing import Annotated

import typer

import expunge
from expunge.cli import doctor, numbers, releases, runs
from expunge.cli.text import echo
from expunge.errors import ExpungeError, InputError, RunError, describe_error

EXTRAS = {"torch": "torch", "sklearn": "torch", "ray": "ray"}
app = typer.Typer(
    name="expunge",
    help="Certified machine unlearning: accounts, plans, runs and certificates.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Certified machine unlearning: accounts, plans, runs and certificates."""
    if version:
        echo(f"expunge {expunge.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for command in (
    numbers.account,
    numbers.calibrate,
    numbers.plan,
    runs.demo,
    runs.init,
    doctor.doctor,
    runs.check,
    runs.unlearn,
    runs.learn,
    runs.forget,
    releases.verify,
    runs.replay,
    releases.audit,
    releases.report,
    releases.show,
    releases.keygen,
    releases.sign,
):
    app.command()(command)


def main() -> None:
    """Run the command line; a process of ``torchrun`` ends as soon as all is said.

    Threads of its process group may outlive the group, and abort a process whose interpreter is
    taken down around them: a finished run would look like a failed one.
    """
    try:
        run()
    except SystemExit as ended:
        started = os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ
        if not started or not isinstance(ended.code, int | None):
            raise
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(ended.code or 0)


def run() -> None:
    """Every error raised on purpose is one sentence and an exit code."""
    streams = [stream for stream in (sys.stdout, sys.stderr) if stream and not stream.closed]
    for stream in streams:
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")  # a terminal in ASCII is shown ? for ε
    try:
        try:
            app(standalone_mode=True)
        except SystemExit:  # what was printed is written before the command counts as done
            for stream in streams:
                stream.flush()
            raise
    except ExpungeError as error:
        if not error.printed_elsewhere:
            _say(str(error))
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        name = f"expunge[{EXTRAS[missing]}]" if missing in EXTRAS else missing
        _say(f"this command needs {missing}; pip install '{name}'")
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:
        if error.filename is None:
            _say(f"what the command reads or prints failed: {error.strerror or error}")
            sys.exit(RunError.exit_code)
        _say(f"{error.filename} cannot be used: {error.strerror}")
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        sys.exit((RunError if full else InputError).exit_code)
    except Exception as error:  # 1 would say that a release does not hold
        _say(f"this is a defect of expunge: {describe_error(error)}; please report it")
        sys.exit(RunError.exit_code)
    finally:  # what cannot be written is not tried again when the interpreter ends, with its code
        for stream in streams:
            try:
                stream.flush()
            except OSError:
                with suppress(OSError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _say(sentence: str) -> None:
    with suppress(OSError):
        echo(f"expunge: {sentence}", err=True)
