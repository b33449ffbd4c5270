"""The command line: thin, and torch is imported only inside the commands that train."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import typer
from typer.core import TyperGroup

from expunge.cli import doctor, heads, jobs, keys, ledger, serve
from expunge.cli.text import AsJson, print_json
from expunge.errors import ExpungeError, InputError, RunError, VerificationError

EXTRAS = {"torch": "torch", "sklearn": "torch", "ray": "ray"} | dict.fromkeys(
    ("sqlalchemy", "alembic", "psycopg", "fastapi", "starlette", "anyio", "uvicorn"), "ledger"
)
RECIPES = ("account", "calibrate")  # their options need the recipes, and so numpy


class Commands(TyperGroup):
    """All commands; those of :mod:`expunge.cli.recipes` are loaded when they are asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*RECIPES, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in RECIPES:
            return super().get_command(ctx, cmd_name)
        from expunge.cli import recipes

        return cast(Any, typer.main.get_command(recipes.app)).commands[cmd_name]


app = typer.Typer(
    name="expunge",
    cls=Commands,
    help="Certified machine unlearning: accounts, plans, runs and certificates.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the versions.")] = False,
) -> None:
    """Certified machine unlearning: accounts, plans, runs and certificates."""
    if version:
        doctor.show_version()
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def plan(
    epsilon: Annotated[
        float | None, typer.Option(help="Target epsilon; not for jobs that forget exactly.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Target delta, with epsilon.")] = None,
    parameters: Annotated[int | None, typer.Option(help="Number of certified parameters.")] = None,
    job: Annotated[
        Path | None, typer.Option(help="A job that has them, and maybe a better route.")
    ] = None,
    pilot: Annotated[
        bool, typer.Option("--pilot", help="Shards: train on the job's data.pilot in some sizes.")
    ] = False,
    scale: Annotated[float | None, typer.Option(help="Noise to be left in each weight.")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Noisy steps of the iterative methods; default: 10.")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="γ of the noisy steps; default: 0.01.")
    ] = None,
    weight_decay: Annotated[
        float | None, typer.Option(help="λ of the noisy steps; default: 10.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Examples per noisy step; default: 128.")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Retained samples, for retraining.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Epochs that retraining takes.")] = None,
    compared_to: Annotated[
        str | None, typer.Option(help="retrained or centre; default: retrained.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Which route: recipes for a target; of a job every route with its cost here, and the next
    command."""
    from expunge.accounting.planning import plan as make_plan
    from expunge.accounting.planning import plan_to_dict
    from expunge.cli.text import print_plan, print_routes
    from expunge.files import to_plain

    given: dict[str, Any] = {"epsilon": epsilon, "delta": delta, "scale": scale, "steps": steps}
    given |= {"learning_rate": learning_rate, "weight_decay": weight_decay}
    given |= {"batch_size": batch_size, "compared_to": compared_to}
    given = {name: value for name, value in given.items() if value is not None}
    if job is not None:
        from expunge.jobs.routes import read_setting

        refused = {"--parameters": parameters, "--samples": samples, "--epochs": epochs}
        for name, value in refused.items():
            if value is not None:
                raise InputError.of(name, value, "left out with --job, which has its own")
        setting = read_setting(job, pilot, **given)
        if as_json:
            own = {} if setting.plan is None else plan_to_dict(setting.plan)
            facts = {k: v for k, v in vars(setting).items() if k not in ("plan", "network")}
            facts = {k: to_plain(v) for k, v in facts.items() if v is not None}
            print_json(own | facts)
        else:
            print_routes(setting)
        return
    if parameters is None:
        raise InputError("Missing option '--parameters'; give it, or --job")
    if pilot:
        raise InputError("--pilot needs --job: a job of shards that names its data.pilot")
    for name in ("epsilon", "delta"):
        if name not in given:
            raise InputError(f"Missing option '--{name}'; the noise is planned for a target")
    found = make_plan(parameters=parameters, samples=samples, epochs=epochs, **given)
    print_json(plan_to_dict(found)) if as_json else print_plan(found)


CertificatePath = Annotated[
    Path, typer.Argument(metavar="CERTIFICATE", help="certificate.json, or its run directory.")
]


@app.command()
def verify(
    certificate: CertificatePath,
    weights: Annotated[
        Path | None, typer.Option(help="Default: model.safetensors, or its index, beside it.")
    ] = None,
    public_key: Annotated[
        Path | None,
        typer.Option("--key", "--public-key", help="The public key it must be signed with (PEM)."),
    ] = None,
    parent: Annotated[
        Path | None, typer.Option(help="The certificate, or run directory, it is chained to.")
    ] = None,
    record: Annotated[Path | None, typer.Option(help="The operator's record of the run.")] = None,
    store: Annotated[
        Path | None,
        typer.Option(help="State of a head built to forget, to be summed again."),
    ] = None,
    retrain: Annotated[
        Path | None,
        typer.Option(help="State of shards: train again what the request touched, compare bits."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Recompute everything: 0 it holds, 1 it does not and why, 2 the input is unusable."""
    from expunge.certificates.verification import describe_key
    from expunge.certificates.verification import verify as check
    from expunge.certificates.wording import find_cautions

    path = certificate / "certificate.json" if certificate.is_dir() else certificate
    unchecked: tuple[str, ...] = ()
    try:
        found = check(path, weights, public_key, parent=parent, record=record)
        if store is not None:
            from expunge.certificates.hashing import find_weights
            from expunge.forgettable.verification import verify_store

            unchecked = verify_store(found, store, weights or find_weights(path))
        if retrain is not None:
            from expunge.jobs.shards import open_shards

            with open_shards(retrain, progress=True) as ensemble:
                ensemble.check(found)
            if parent is None and found.parent is not None:
                unchecked += (
                    "what was not trained again was compared with nothing: give --parent",
                )
    except VerificationError as error:
        if as_json:
            print_json({"holds": False, "differs": str(error)})
        raise
    if as_json:
        key = {"key": describe_key(found, public_key is not None)}
        cautions = {"cautions": [*find_cautions(found), *unchecked]}
        print_json({"holds": True} | key | cautions | found.model_dump(mode="json"))
        return
    typer.echo(
        f"{path} holds: epsilon = {found.epsilon:.6g}, delta = {found.delta:.6g}, "
        f"compared to {found.compared_to}; " + describe_key(found, public_key is not None)
    )
    for warning in (*found.warnings, *find_cautions(found), *unchecked):
        typer.echo(f"  {warning}")


@app.command()
def show(
    certificate: CertificatePath,
    model_card: Annotated[bool, typer.Option(help="A Hugging Face model-card block.")] = False,
) -> None:
    """A certificate in plain language, as it stands: `verify` says whether it holds."""
    from expunge.certificates.certificate import Certificate

    path = certificate / "certificate.json" if certificate.is_dir() else certificate
    found = Certificate.load(path)
    typer.echo(found.model_card() if model_card else found.statement())


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")],
    public: Annotated[
        bool, typer.Option("--public", help="report-public.html: only what may be released.")
    ] = False,
) -> None:
    """Write report.html anew from what a run directory holds."""
    from expunge.reports.page import write_report

    typer.echo(write_report(directory, public=public))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where to leave the releases.")] = Path("runs/demo"),
) -> None:
    """Forget by every route on embedded data, and say which to take: under a minute."""
    from expunge.cli.demo import run_demo

    run_demo(out)


for command in (
    jobs.unlearn,
    jobs.init,
    heads.learn,
    heads.forget,
    keys.keygen,
    keys.sign,
    doctor.doctor,
):
    app.command()(command)
app.add_typer(ledger.app, name="ledger", rich_help_panel=None)
app.command()(serve.serve)
for command in (serve.token, serve.tokens, serve.revoke):
    ledger.app.command()(command)


@app.command()
def audit(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")],
    trials: Annotated[
        int | None, typer.Option(help="Runs of the engine; default: what --seconds allow.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time budget.")] = 60.0,
    confidence: Annotated[float, typer.Option(help="All bounds hold with it.")] = 0.999,
    seed: Annotated[int | None, typer.Option(help="Repeatable noise; default: system's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Attack the engine with a run's recipe: 0 no contradiction, 1 the certificate is refuted."""
    from expunge.auditing.bounds import list_facts
    from expunge.auditing.mechanism import audit_run
    from expunge.files import to_plain

    found = audit_run(
        directory,
        trials=trials,
        seconds=seconds,
        confidence=confidence,
        seed=seed,
        progress=True,
    )
    if as_json:
        print_json(to_plain(found))
    else:
        typer.echo("\n".join(list_facts(found)))
    if found.contradicts:
        raise typer.Exit(1)


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
    for stream in _list_streams():
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")  # a terminal in ASCII is shown ? for ε
    try:
        _run_command()
    except ExpungeError as error:
        if not error.told_by_another:
            _say(str(error))
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        extra = f"pip install 'expunge[{EXTRAS[missing]}]'"
        _say(f"this command needs {missing}; {extra}")
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
    finally:
        _drop_unwritten()


def _run_command() -> None:
    """The command; what it printed is written before it counts as done."""
    try:
        app()
    except SystemExit:
        for stream in _list_streams():
            stream.flush()
        raise


def _say(sentence: str) -> None:
    with suppress(OSError):
        typer.echo(f"expunge: {sentence}", err=True)


def _drop_unwritten() -> None:
    """What could not be written is not tried again when the interpreter ends, with another code."""
    for stream in _list_streams():
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _list_streams() -> list[TextIO]:
    return [
        stream for stream in (sys.stdout, sys.stderr) if stream is not None and not stream.closed
    ]
