"""The command line: thin, and torch is imported only inside the commands that train."""

from __future__ import annotations

import dataclasses
import json
import sys
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from expunge.cli import jobs as jobcommands
from expunge.errors import ExpungeError, InputError

app = typer.Typer(
    name="expunge",
    help="Certified machine unlearning: accounts, plans, runs and certificates.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

FREE: dict[str, Literal["smallest", "fewest", "largest"]] = {
    "noise_std": "smallest",
    "noise_multiplier": "smallest",
    "steps": "fewest",
    "start_clip": "largest",
    "model_clip": "largest",
    "grad_clip": "largest",
}

Method = Annotated[
    str | None,
    typer.Argument(
        metavar="METHOD",
        show_default=False,
        help="gradient-clipping, model-clipping, output-perturbation, retraining, group-dp-sgd, "
        "noisy-descent or rewind-to-delete; left out with --recipe.",
    ),
]
StartClip = Annotated[float | None, typer.Option(help="C0: norm of the start around the centre.")]
GradClip = Annotated[float | None, typer.Option(help="C1: norm of each gradient.")]
ModelClip = Annotated[float | None, typer.Option(help="C2: norm of the model at each step.")]
LearningRate = Annotated[float | None, typer.Option(help="γ of the noisy steps.")]
WeightDecay = Annotated[float | None, typer.Option(help="λ: pull towards the centre.")]
Steps = Annotated[int | None, typer.Option(help="T: number of noisy steps.")]
NoiseStd = Annotated[float | None, typer.Option(help="σ: noise of each step.")]
StartNoiseStd = Annotated[float | None, typer.Option(help="σ0: noise added to the start.")]
Clip = Annotated[float | None, typer.Option(help="DP-SGD: norm of each example's gradient.")]
NoiseMultiplier = Annotated[float | None, typer.Option(help="DP-SGD: noise in units of clip.")]
SamplingRate = Annotated[float | None, typer.Option(help="DP-SGD: Poisson sampling rate.")]
GroupSize = Annotated[int | None, typer.Option(help="Examples to forget (methods that need it).")]
RecipeFile = Annotated[
    Path | None,
    typer.Option("--recipe", help="TOML file with method = … and its parameters; may hold lists."),
]
ComparedTo = Annotated[str, typer.Option(help="retrained or centre.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the versions.")] = False,
) -> None:
    """Certified machine unlearning: accounts, plans, runs and certificates."""
    if version:
        jobcommands.show_version()
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def account(
    method: Method = None,
    start_clip: StartClip = None,
    grad_clip: GradClip = None,
    model_clip: ModelClip = None,
    learning_rate: LearningRate = None,
    weight_decay: WeightDecay = None,
    steps: Steps = None,
    noise_std: NoiseStd = None,
    start_noise_std: StartNoiseStd = None,
    clip: Clip = None,
    noise_multiplier: NoiseMultiplier = None,
    sampling_rate: SamplingRate = None,
    group_size: GroupSize = None,
    recipe: RecipeFile = None,
    epsilon: Annotated[float | None, typer.Option(help="Solve for delta at this epsilon.")] = None,
    delta: Annotated[float | None, typer.Option(help="Solve for epsilon at this delta.")] = None,
    compared_to: ComparedTo = "retrained",
    curve: Annotated[Path | None, typer.Option(help="Also draw it: .svg, .png or .pdf.")] = None,
    as_json: AsJson = False,
) -> None:
    """What a recipe certifies: give --delta or --epsilon, get the other."""
    given = dict(locals())
    from expunge.accounting.guarantee import guarantee, guarantee_to_dict
    from expunge.cli.text import print_guarantee
    from expunge.recipes import from_dict

    made = from_dict(_collect(given))
    found = guarantee(made, epsilon=epsilon, delta=delta, compared_to=cast(Any, compared_to))
    if curve is not None:
        from expunge.reports.plotting import draw_curve

        draw_curve(made, curve, epsilon=epsilon, delta=delta, compared_to=cast(Any, compared_to))
    if as_json:
        _print_json(guarantee_to_dict(made, found))
    else:
        print_guarantee(made, found)


@app.command()
def calibrate(
    epsilon: Annotated[float, typer.Option(help="Target epsilon.")],
    delta: Annotated[float, typer.Option(help="Target delta.")],
    method: Method = None,
    start_clip: StartClip = None,
    grad_clip: GradClip = None,
    model_clip: ModelClip = None,
    learning_rate: LearningRate = None,
    weight_decay: WeightDecay = None,
    steps: Steps = None,
    noise_std: NoiseStd = None,
    start_noise_std: StartNoiseStd = None,
    clip: Clip = None,
    noise_multiplier: NoiseMultiplier = None,
    sampling_rate: SamplingRate = None,
    group_size: GroupSize = None,
    recipe: RecipeFile = None,
    parameters: Annotated[
        int | None, typer.Option(help="Certified parameters: count their finite precision too.")
    ] = None,
    compared_to: ComparedTo = "retrained",
    as_json: AsJson = False,
) -> None:
    """The one parameter you leave out (noise, steps or a clip) that just meets the target."""
    given = dict(locals())
    from expunge.accounting.calibration import calibrate as find_best
    from expunge.accounting.guarantee import guarantee, guarantee_to_dict
    from expunge.cli.text import print_guarantee
    from expunge.recipes import METHODS, from_dict

    data = _collect(given)
    kind = METHODS.get(data.get("method", ""))
    if kind is None:
        from_dict(data)
    fields = dataclasses.fields(cast(Any, kind))
    missing = [f.name for f in fields if f.default is f.default_factory and f.name not in data]
    if len(missing) != 1 or missing[0] not in FREE:
        raise InputError(
            f"calibrate needs exactly one of {', '.join(f.name for f in fields if f.name in FREE)} "
            f"left out; missing here: {', '.join(missing) or 'nothing'}"
        )
    free = missing[0]

    def make(value: float) -> Any:
        return from_dict(data | {free: int(value) if free == "steps" else value})

    best = find_best(
        make,
        epsilon=epsilon,
        delta=delta,
        compared_to=cast(Any, compared_to),
        find=FREE[free],
        parameters=parameters,
    )
    found = guarantee(best, delta=delta, compared_to=cast(Any, compared_to))
    if as_json:
        _print_json(guarantee_to_dict(best, found))
    else:
        print_guarantee(best, found)


@app.command()
def plan(
    epsilon: Annotated[float, typer.Option(help="Target epsilon.")],
    delta: Annotated[float, typer.Option(help="Target delta.")],
    parameters: Annotated[int, typer.Option(help="Number of certified parameters.")],
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
    from expunge.cli.text import print_plan

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
        _print_json(plan_to_dict(found))
    else:
        print_plan(found)


CertificatePath = Annotated[
    Path, typer.Argument(metavar="CERTIFICATE", help="certificate.json, or its run directory.")
]
SignWith = Annotated[
    Path | None, typer.Option("--sign", metavar="KEY.PEM", help="Sign with this Ed25519 key.")
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
    as_json: AsJson = False,
) -> None:
    """Recompute everything: 0 it holds, 1 it does not and why, 2 the input is unusable."""
    from expunge.certificates.verification import verify as check

    path = certificate / "certificate.json" if certificate.is_dir() else certificate
    found = check(path, weights, public_key, parent=parent, record=record)
    if as_json:
        _print_json({"holds": True} | found.model_dump(mode="json"))
        return
    typer.echo(
        f"{path} holds: epsilon = {found.epsilon:.6g}, delta = {found.delta:.6g}, "
        f"compared to {found.compared_to}; "
        + ("signed" if found.signature is not None else "not signed")
    )
    for warning in found.warnings:
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
    sign: SignWith = None,
) -> None:
    """Train, forget, certify and verify on embedded data: no download, under a minute."""
    from expunge.cli.demo import run_demo

    run_demo(out, sign)


for command in (jobcommands.unlearn, jobcommands.init, jobcommands.doctor):
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
        _print_json(to_plain(found))
    else:
        typer.echo("\n".join(list_facts(found)))
    if found.contradicts:
        raise typer.Exit(1)


def _collect(given: dict[str, Any]) -> dict[str, Any]:
    """The recipe as plain data from the options, or from --recipe with options on top."""
    names = (
        "start_clip grad_clip model_clip learning_rate weight_decay steps noise_std "
        "start_noise_std clip noise_multiplier sampling_rate group_size"
    )
    options = {name: given[name] for name in names.split() if given.get(name) is not None}
    data = _read_recipe(given["recipe"]) if given["recipe"] is not None else {}
    if given["method"] is not None:
        if data.get("method", given["method"]) != given["method"]:
            raise InputError(
                f"METHOD is {given['method']!r} but the recipe file says {data['method']!r}"
            )
        data["method"] = given["method"]
    return data | options


def _read_recipe(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--recipe {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"--recipe {path} is not valid TOML: {error}") from None


def _print_json(data: dict[str, Any]) -> None:
    typer.echo(json.dumps(data, ensure_ascii=False, allow_nan=False, indent=2))


def main() -> None:
    """Run the command line; every error raised on purpose is one sentence and an exit code."""
    try:
        app()
    except ExpungeError as error:
        if not error.told_by_another:
            typer.echo(f"expunge: {error}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.exit(1)
