"""A signature for a run directory that is there: its certificate, and the pages about it.

The digest that the weights repeat does not cover the signature, so the weights stay as they are;
and a later certificate that names this one is still chained to it (``check_link``).
"""

from __future__ import annotations

from pathlib import Path

from expunge.certificates.signing import fingerprint
from expunge.certificates.verification import describe_key, verify
from expunge.errors import InputError
from expunge.reports.page import write_report


def sign_run(directory: str | Path, private_key: bytes | str | Path) -> str:
    """Sign the certificate in ``directory`` and write its reports anew; says whose signature it is.

    What does not hold is not signed, nor is what somebody else has signed.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise InputError.of("DIR", str(directory), "a run directory")
    record = folder / "record.json"
    before = verify(folder, record=record if record.exists() else None)
    after = before.sign(private_key)
    assert after.signature is not None
    if before.signature is not None and before.signature.public_key != after.signature.public_key:
        raise InputError(
            f"{folder} is signed already, by {fingerprint(before.signature.public_key)}; one "
            "certificate has one signature"
        )
    try:
        for place in (folder, folder / "adapter"):
            if (place / "certificate.json").exists():
                after.save(place / "certificate.json")
        if record.exists() and (folder / "metrics.json").exists():
            write_report(folder)
        if (folder / "report-public.html").exists():
            write_report(folder, public=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}") from None
    verify(folder)
    return describe_key(after, compared=True).removesuffix(", the expected key")
