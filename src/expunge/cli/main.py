"""The command line: thin, and torch is imported only inside the commands that train."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from expunge.cli import doctor, heads, jobs
from expunge.cli.text import AsJson, ComparedTo, print_json
from expunge.errors import ExpungeError, InputError

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
    epsilon: Annotated[float, typer.Option(help="Target epsilon.")],
    delta: Annotated[float, typer.Option(help="Target delta.")],
    parameters: Annotated[int | None, typer.Option(help="Number of certified parameters.")] = None,
    job: Annotated[
        Path | None, typer.Option(help="A job that has them, and maybe a better route.")
    ] = None,
    scale: Annotated[float | None, typer.Option(help="Noise to be left in each weight.")] = None,
    steps: Annotated[int, typer.Option(help="Noisy steps of the iterative methods.")] = 10,
    learning_rate: Annotated[float, typer.Option(help="γ of the noisy steps.")] = 0.01,
    weight_decay: Annotated[float, typer.Option(help="λ of the noisy steps.")] = 10.0,
    batch_size: Annotated[int, typer.Option(help="Examples per noisy step.")] = 128,
    compared_to: ComparedTo = "retrained",
    as_json: AsJson = False,
) -> None:
    """Recipes of each method for a target, their cost, and what could survive."""
    from expunge.accounting.planning import plan as make_plan
    from expunge.accounting.planning import plan_to_dict
    from expunge.cli.text import print_plan, print_routes
    from expunge.files import to_plain

    setting = None
    if job is not None:
        from expunge.jobs.routes import read_setting

        setting = read_setting(job)
        parameters = setting.parameters
    elif parameters is None:
        raise InputError("Missing option '--parameters'; give it, or --job")
    routes = [] if setting is None else to_plain(setting.routes)
    if setting is not None and parameters is None:
        facts = {"routes": routes, "costs": to_plain(setting.costs)}
        print_json(facts) if as_json else print_routes(setting)
        return
    assert parameters is not None
    found = make_plan(
        epsilon=epsilon,
        delta=delta,
        parameters=parameters,
        scale=scale,
        steps=steps,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        batch_size=batch_size,
        compared_to=cast(Any, compared_to),
    )
    if as_json:
        print_json(plan_to_dict(found) | ({"routes": routes} if routes else {}))
        return
    print_plan(found)
    if setting is not None:
        print_routes(setting)


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
        Path | None, typer.Option(help="PEM file of the Ed25519 key it must be signed with.")
    ] = None,
    parent: Annotated[Path | None, typer.Option(help="The certificate it is chained to.")] = None,
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
    from expunge.certificates.verification import verify as check
    from expunge.certificates.wording import find_cautions

    path = certificate / "certificate.json" if certificate.is_dir() else certificate
    found = check(path, weights, public_key, parent=parent, record=record)
    unchecked: tuple[str, ...] = ()
    if store is not None:
        from expunge.certificates.hashing import find_weights
        from expunge.forgettable.verification import verify_store

        unchecked = verify_store(found, store, weights or find_weights(path))
    if retrain is not None:
        from expunge.jobs.shards import open_shards

        with open_shards(retrain, progress=True) as ensemble:
            ensemble.check(found)
    if as_json:
        print_json({"holds": True} | found.model_dump(mode="json"))
        return
    typer.echo(
        f"{path} holds: epsilon = {found.epsilon:.6g}, delta = {found.delta:.6g}, "
        f"compared to {found.compared_to}; "
        + ("signed" if found.signature is not None else "not signed")
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
    out: Annotated[Path, typer.Option(help="Where to leave the run.")] = Path("runs/demo"),
) -> None:
    """Train, forget, certify and verify on embedded data: no download, under a minute."""
    from expunge.cli.demo import run_demo

    run_demo(out)


for command in (jobs.unlearn, jobs.init, heads.learn, heads.forget, doctor.doctor):
    app.command()(command)


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
    """Run the command line; every error raised on purpose is one sentence and an exit code."""
    try:
        app()
    except ExpungeError as error:
        if not error.told_by_another:
            typer.echo(f"expunge: {error}", err=True)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        typer.echo("expunge: this command needs torch; pip install 'expunge[torch]'", err=True)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(1)
