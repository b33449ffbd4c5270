"""What is done with a release, without torch: verify, show, report, audit, keys."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expunge.cli import text
from expunge.cli.text import AsJson, Folder, print_json, quote
from expunge.errors import InputError, VerificationError

if TYPE_CHECKING:
    from expunge.certificates.certificate import Certificate


def verify(
    folder: Folder,
    key: Annotated[
        Path | None,
        typer.Option(help="The public key it must be signed with (PEM)."),
    ] = None,
    parent: Annotated[
        Path | None, typer.Option(help="The folder of the release before, or its certificate.")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="Default: model.safetensors in DIR.")] = None,
    record: Annotated[
        Path | None, typer.Option(help="The operator's private record of the run.")
    ] = None,
    people: Annotated[
        Path | None, typer.Option(help="A list: the record must name exactly these as forgotten.")
    ] = None,
    column: Annotated[str | None, typer.Option(help="The column of that list.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check a release: everything is recomputed.

    Exit 0 it holds, 1 it does not, and why, 2 the input is unusable.
    """
    from expunge.certificates.verification import verify as check
    from expunge.certificates.wording import list_facts

    given: dict[str, Any] = {"key": key, "parent": parent, "weights": weights, "record": record}
    if people is not None:
        from expunge.jobs.lists import read_list

        given["people"] = read_list(people, column)
    try:
        found = check(folder, **given)
    except VerificationError as error:
        if as_json:
            print_json({"holds": False, "differs": str(error)})
        raise
    certificate = found.certificate
    signed = "not signed" if certificate.signature is None else _describe_signer(certificate)
    guarantee = list_facts(certificate)["guarantee"]
    lines = [
        f"{quote(folder)} holds: {guarantee}, compared to {certificate.compared_to}; {signed}",
        *certificate.warnings,
        *(f"not looked at: {sentence}" for sentence in found.unchecked),
    ]
    facts: dict[str, Any] = {"holds": True, "checked": found.checked, "unchecked": found.unchecked}
    facts["certificate"] = certificate.model_dump(mode="json")
    text.show(facts, "\n  ".join(lines), as_json)


def show(folder: Folder, as_json: AsJson = False) -> None:
    """A certificate in plain language; `verify` says if it holds."""
    from expunge.certificates.certificate import Certificate, check_digest

    found = Certificate.load(folder / "certificate.json" if folder.is_dir() else folder)
    for problem in check_digest(found):
        raise VerificationError(f"{folder} does not hold: {problem}")
    text.show(found.model_dump(mode="json"), found.statement().rstrip(), as_json)


def report(
    folder: Folder,
    public: Annotated[
        bool, typer.Option("--public", help="report-public.html: only what may be released.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write report.html anew, from the folder of a release."""
    from expunge.report.page import write_report

    written = write_report(folder, public=public)
    text.show({"report": str(written)}, str(written), as_json)


def audit(
    folder: Folder,
    trials: Annotated[
        int | None, typer.Option(help="Runs of the engine; default: what --seconds allow.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time budget.")] = 60.0,
    confidence: Annotated[float, typer.Option(help="All bounds hold with it.")] = 0.999,
    seed: Annotated[int | None, typer.Option(help="Repeatable noise; default: system's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Attack the engine with the recipe of a noisy release.

    Exit 0 no contradiction, 1 the certificate is refuted. Exact releases have no noise to attack:
    replay them.
    """
    from expunge.audit.mechanism import audit_run

    options = {"trials": trials, "seconds": seconds, "confidence": confidence, "seed": seed}
    found = audit_run(folder, progress=True, **options)
    text.show(found.to_dict(), str(found), as_json)
    if found.contradicts:
        raise typer.Exit(1)


def keygen(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The private key; FILE.pub beside.")],
    as_json: AsJson = False,
) -> None:
    """Make a key pair (Ed25519): one to sign, one to publish."""
    from expunge.certificates.signing import fingerprint, read_public_key, write_key_pair

    private, public = write_key_pair(file)
    mark = fingerprint(read_public_key(public))
    said = (
        f"{private}: the private key, which only you may read; keep it\n"
        f"{public}: the public key, {mark}; publish it"
    )
    facts = {"private": str(private), "public": str(public), "fingerprint": mark}
    text.show(facts, said, as_json)


def sign(
    folder: Folder,
    key: Annotated[Path, typer.Option(help="The Ed25519 private key (PEM).")],
    as_json: AsJson = False,
) -> None:
    """Sign the certificate of a release, if it holds."""
    from expunge.certificates.verification import verify as check
    from expunge.report.page import write_report

    if not folder.is_dir():
        raise InputError.of("DIR", str(folder), "the folder of a release")
    before = check(folder).certificate
    after = before.sign(key)
    if before.signature not in (None, after.signature):
        raise InputError(
            f"{folder} is {_describe_signer(before)} already; one certificate has one signature"
        )
    for place in (folder, folder / "adapter"):
        if (place / "certificate.json").exists():
            after.save(place / "certificate.json")
    for name, public in (("report.html", False), ("report-public.html", True)):
        if (folder / name).exists():
            write_report(folder, public=public)
    said = _describe_signer(after)
    text.show({"folder": str(folder), "signature": said}, f"{quote(folder)}: {said}", as_json)


def _describe_signer(certificate: Certificate) -> str:
    from expunge.certificates.signing import fingerprint

    assert certificate.signature is not None
    return f"signed by the key {fingerprint(certificate.signature.public_key)}"
