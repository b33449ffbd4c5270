"""The commands that train: check, unlearn, learn, forget, replay; and init, demo."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from expunge.cli.text import AsJson, Folder, echo, print_json, quote, show, visible, write
from expunge.errors import InputError, VerificationError

if TYPE_CHECKING:
    from expunge.certificates.release import Release
    from expunge.jobs.routes import Routes

Kind = Literal["plain", "lora", "head", "shards"]
TEMPLATES = Path(__file__).parent / "templates"
# Python is kept as text in the package, so that no tool takes it for a part of it.
FILES = {"job.toml": "job.toml", "own.py": "own.py.txt", "forget.txt": "forget.txt"}
_TRAIN = "python own.py && expunge unlearn job.toml"
_LEARN = "expunge learn job.toml && expunge forget state forget.txt --out release-2"
NEXT: dict[Kind, str] = {"plain": _TRAIN, "lora": _TRAIN, "head": _LEARN, "shards": _LEARN}
JobPath = Annotated[Path, typer.Argument(metavar="JOB.TOML", help="What to do; see expunge init.")]


def demo(
    out: Annotated[Path, typer.Option(help="Where to leave the releases.")] = Path("runs/demo"),
    as_json: AsJson = False,
) -> None:
    """Forget by every route on embedded data: under a minute."""
    from expunge.cli.demo import run_demo

    run_demo(out, as_json)


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the files.")],
    head: Annotated[
        bool, typer.Option("--head", help="A linear model on a published network's features.")
    ] = False,
    shards: Annotated[
        bool, typer.Option("--shards", help="An ensemble of which a request trains a part again.")
    ] = False,
    lora: Annotated[
        bool, typer.Option("--lora", help="A Hugging Face model with a LoRA adapter.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write job.toml, own.py and forget.txt, yours to change.

    They run as they are, and explain themselves.
    """
    kinds: dict[Kind, bool] = {"head": head, "shards": shards, "lora": lora}
    asked: list[Kind] = [kind for kind, given in kinds.items() if given]
    if len(asked) > 1:
        raise InputError(f"--{' and --'.join(asked)} are kinds of job; name one of them")
    kind: Kind = asked[0] if asked else "plain"
    written, then = write_template(folder, kind), f"cd {quote(folder)} && {NEXT[kind]}"
    files = [str(path) for path in written]
    show({"files": files, "next": then}, "\n".join([*files, f"next: {then}"]), as_json)


def check(job: JobPath, as_json: AsJson = False) -> None:
    """Every mistake of a job at once; nothing is trained."""
    from expunge.jobs.checking import check_job

    with logging_to_stderr():
        found = check_job(job)
    facts = {"job": str(job), "good": True, "facts": found}
    show(facts, "\n  ".join([f"{quote(job)} can run:", *found]), as_json)


def unlearn(
    job: JobPath,
    out: Annotated[
        Path | None, typer.Option(help="Where to leave the release; default: output.dir.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a stopped run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a job: leave people out, train, certify, report.

    Exit 0 done, 2 refused, 3 failed and may be tried again, 130 or 143 stopped. Under torchrun too.
    """
    from expunge.jobs.jobfile import read_job
    from expunge.jobs.run import find_target, run_job
    from expunge.jobs.tables import UnlearnJob

    where = "" if out is None else f" --out {quote(out)}"
    with logging_to_stderr(f"; go on with: expunge unlearn {quote(job)}{where} --resume"):
        release = run_job(job, out=out, resume=resume, progress=True)
    if is_first():
        print_release(release, find_target(read_job(job).of(UnlearnJob), out), as_json)


def learn(
    job: JobPath,
    ray: Annotated[bool, typer.Option("--ray", help="Shards: train them on Ray.")] = False,
    as_json: AsJson = False,
) -> None:
    """Learn a job's examples into a state that can forget.

    All of them or none, through crashes; again, those that are new.
    """
    from expunge.jobs.learning import learn_job

    with logging_to_stderr():
        found, release = learn_job(job, ray=ray)
    state, folder = found["state"], found["folder"]
    if as_json:
        facts = found | {"state": str(state), "folder": folder and str(folder)}
        if release is not None:
            facts["certificate"] = release.certificate.model_dump(mode="json")
        print_json(facts)
        return
    echo(
        f"{quote(state)}: {found['new']:,} examples are new; it has {found['examples']:,} of "
        f"{found['people']:,} people and is private"
    )
    if release is not None:
        print_release(release, folder)
    echo(f"  forget with: expunge forget {quote(state)} forget.txt --out release-2")


def forget(
    state: Annotated[Path, typer.Argument(metavar="STATE", help="What learn wrote; private.")],
    names: Annotated[Path, typer.Argument(metavar="LIST", help="Names: text, CSV, JSON, Parquet.")],
    out: Annotated[Path, typer.Option(help="A new folder for the release.")] = Path("release"),
    column: Annotated[
        str | None, typer.Option(help="The column of a CSV or Parquet list, or a JSON object.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Forget people in a state, and write its next release.

    After a crash the same command again goes on where it was.
    """
    from expunge.jobs.lists import read_list
    from expunge.jobs.opening import forget_in_state

    with logging_to_stderr():
        release = forget_in_state(state, read_list(names, column), out)
    print_release(release, out, as_json)


def replay(
    folder: Folder,
    job: Annotated[Path, typer.Argument(metavar="JOB.TOML", help="The job that made it.")],
    as_json: AsJson = False,
) -> None:
    """Make an exact release again, and compare all bits.

    Exit 0 the same, 1 not, and what could make them differ.
    """
    from expunge.jobs.replaying import replay_job

    try:
        with logging_to_stderr():
            found = replay_job(folder, job)
    except VerificationError as error:
        if as_json:
            print_json({"same": False, "differs": str(error)})
        raise
    text = "\n  ".join([f"{quote(folder)}: the same bits again", *found])
    show({"same": True, "facts": found}, text, as_json)


def print_release(release: Release, folder: Path, as_json: bool = False) -> None:
    """What was written, what it promises, who was forgotten, and how to check it."""
    from expunge.certificates.wording import list_facts

    certificate = release.certificate
    said = list_facts(certificate)
    lines = [
        f"{quote(folder)}: {said['guarantee']}, compared to {certificate.compared_to}",
        f"forgotten: {said['forgotten']}; retained: {said['retained']}",
        *certificate.warnings,
        f"check it with: expunge verify {quote(folder)}",
    ]
    facts = {"folder": str(folder), "certificate": certificate.model_dump(mode="json")}
    show(facts, "\n  ".join(lines), as_json)


def print_routes(found: Routes, as_json: bool) -> None:
    """The routes of a job: what each asks for and costs, and the next command."""
    if as_json:
        from expunge.files import to_plain

        print_json(to_plain(found))
        return
    write(found.setting)
    for route in found.routes:
        mark = "*" if route.name == found.taken else " "
        echo(f"\n{mark} {route.name}: {route.guarantee}")
        for title, words in (("keeps", route.keeps), ("costs", route.costs), ("asks", route.asks)):
            write(f"    {title}: {words}", "      ")
    echo("")
    for note in found.notes:
        write(note)
    echo(f"* is what the job takes. Next: {found.next}")


def is_first() -> bool:
    """Whether this process prints: under torchrun the first one does, for all."""
    return os.environ.get("RANK", "0") == "0" or "WORLD_SIZE" not in os.environ


@contextmanager
def logging_to_stderr(again: str = "") -> Generator[None]:
    """What a run says on its way goes to stderr, one plain line each. SIGTERM stops it as Ctrl-C
    does, with the exit code that shells give; ``again`` says how to go on."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    log, before = logging.getLogger("expunge"), signal.signal(signal.SIGTERM, stop)
    handler = logging.StreamHandler(sys.stderr) if is_first() else logging.NullHandler()
    handler.setFormatter(_Visible("%(message)s"))
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        yield
    except KeyboardInterrupt as stopped:  # typer would end it with a code of its own
        if is_first():
            echo(f"expunge: stopped{again}", err=True)
        ended = signal.SIGTERM if stopped.args == (signal.SIGTERM,) else signal.SIGINT
        raise typer.Exit(128 + ended) from None
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        signal.signal(signal.SIGTERM, before)


class _Visible(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record), lines=True)


def write_template(folder: str | Path, kind: Kind = "plain") -> list[Path]:
    """Write job.toml, own.py and forget.txt; refuse if any of them is there already.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [path.name for path in write_template(folder)]
    ['job.toml', 'own.py', 'forget.txt']
    """
    from expunge.files import write_atomic

    target = Path(folder)
    taken = [target / name for name in FILES if (target / name).exists()]
    if taken:
        raise InputError(f"{taken[0]} exists already; nothing was written, name another folder")
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, file in FILES.items():
            write_atomic(target / name, (TEMPLATES / kind / file).read_bytes())
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror}") from None
    return [target / name for name in FILES]
