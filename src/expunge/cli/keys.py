"""The commands of keys: make a pair, sign the certificate of a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def keygen(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The private key; FILE.pub beside.")],
) -> None:
    """Make an Ed25519 key pair: the private key for `sign`, the public one to publish."""
    from expunge.certificates.signing import fingerprint, read_public_key, write_key_pair

    private, public = write_key_pair(file)
    typer.echo(
        f"{private}: the private key, which only you may read; keep it\n"
        f"{public}: the public key, {fingerprint(read_public_key(public))}; publish it"
    )


def sign(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")],
    key: Annotated[Path, typer.Option(help="The Ed25519 private key (PEM).")],
) -> None:
    """Sign the certificate of a run directory, if it holds, and write its report anew."""
    from expunge.reports.signing import sign_run

    typer.echo(f"{directory}: {sign_run(directory, key)}")
