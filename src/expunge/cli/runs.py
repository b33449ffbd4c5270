"""The commands that train: check, unlearn, learn, forget, replay; and init, demo."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from expunge.cli.text import AsJson, Folder, echo, print_json, quote, visible, write
from expunge.display import round_up
from expunge.errors import InputError, VerificationError

if TYPE_CHECKING:
    from expunge.certificates.release import Release
    from expunge.jobs.routes import Routes

Kind = Literal["plain", "lora", "head", "shards"]
TEMPLATES = Path(__file__).parent / "templates"
FILES = {"job.toml": "job.toml", "own.py": "own.py.txt", "forget.txt": "forget.txt"}
NEXT: dict[Kind, str] = {
    "plain": "python own.py && expunge unlearn job.toml",
    "lora": "python own.py && expunge unlearn job.toml",
    "head": "expunge learn job.toml && expunge forget state forget.txt --out release-2",
    "shards": "expunge learn job.toml && expunge forget state forget.txt --out release-2",
}
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
    if as_json:
        print_json({"files": [str(path) for path in written], "next": then})
        return
    for path in written:
        echo(str(path))
    echo(f"next: {then}", err=True)


def check(job: JobPath, as_json: AsJson = False) -> None:
    """Every mistake of a job at once; nothing is trained."""
    from expunge.jobs.checking import check_job

    with logging_to_stderr():
        found = check_job(job)
    if as_json:
        print_json({"job": str(job), "good": True, "facts": found})
        return
    echo(f"{quote(job)} can run:")
    for sentence in found:
        echo(f"  {sentence}")


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
    from expunge.jobs.jobfile import read_unlearn_job
    from expunge.jobs.run import find_target, run_job

    with logging_to_stderr():
        release = run_job(job, out=out, resume=resume, progress=True)
    if is_first():
        print_release(release, find_target(read_unlearn_job(job), out), as_json)


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
        done = learn_job(job, ray=ray)
    if as_json:
        facts: dict[str, Any] = {"state": str(done.state), "kind": done.kind}
        facts |= {"examples": done.examples, "people": done.people, "new": done.new}
        if done.release is not None:
            facts["certificate"] = done.release.certificate.model_dump(mode="json")
        print_json(facts)
        return
    echo(
        f"{quote(done.state)}: {done.new:,} examples are new; it has {done.examples:,} of "
        f"{done.people:,} people and is private"
    )
    if done.release is not None and done.folder is not None:
        print_release(done.release, done.folder)
    echo(f"  forget with: expunge forget {quote(done.state)} forget.txt --out release-2")


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
    print_json({"same": True, "facts": found}) if as_json else echo(
        f"{quote(folder)}: the same bits again" + "".join(f"\n  {line}" for line in found)
    )


def print_release(release: Release, folder: Path, as_json: bool = False) -> None:
    """What was written, what it promises, and how to check it."""
    certificate = release.certificate
    if as_json:
        facts = {"folder": str(folder), "certificate": certificate.model_dump(mode="json")}
        print_json(facts)
        return
    echo(
        f"{quote(folder)}: epsilon = {round_up(certificate.epsilon)}, "
        f"delta = {round_up(certificate.delta)}, compared to {certificate.compared_to}"
    )
    for warning in certificate.warnings:
        echo(f"  {warning}")
    echo(f"  check it with: expunge verify {quote(folder)}")


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
def logging_to_stderr() -> Generator[None]:
    """What a run says on its way goes to stderr, one plain line each."""
    log = logging.getLogger("expunge")
    handler = logging.StreamHandler(sys.stderr) if is_first() else logging.NullHandler()
    before = log.level
    handler.setFormatter(_Visible("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    except KeyboardInterrupt as stop:  # typer would end it with a code of its own
        if is_first():
            echo(f"expunge: {str(stop) or 'stopped'}", err=True)
        raise typer.Exit(getattr(stop, "exit_code", 130)) from None
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


class _Visible(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record), lines=True)


def write_template(folder: str | Path, kind: Kind = "plain") -> list[Path]:
    """Write job.toml, own.py and forget.txt; refuse if any of them is there already.

    Python is kept as text in the package, so that no tool takes it for a part of it.

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
