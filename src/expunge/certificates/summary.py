"""A certificate in ten lines, for notebooks and print: no more than its statement says."""

from __future__ import annotations

from expunge.certificates.schema import CertificateWire
from expunge.certificates.wording import (
    METHOD_WORDS,
    count_steps,
    find_cautions,
    name_reference,
    name_set,
    name_unseen,
)
from expunge.display import Sheet, round_up


def summarise(certificate: CertificateWire) -> Sheet:
    """What the certificate claims; nothing of it is checked here."""
    c, chance = certificate, f"{round_up(100 * certificate.survival_bound, 3)} %"
    cautions = (*c.warnings, *find_cautions(c))
    differ = f"{chance} of runs can differ, in any way, from runs that never saw {name_unseen(c)}"
    return Sheet(
        "Certificate of unlearning: what it claims, to be checked by expunge.verify",
        [
            ("guarantee", f"epsilon = {round_up(c.epsilon)}, delta = {round_up(c.delta)}"),
            ("compared to", name_reference(c)),
            ("at most", differ),
            ("method", f"{METHOD_WORDS[c.recipe.method]}; {count_steps(c)}"),
            ("forgotten", name_set(c.data.forget)),
            ("retained", name_set(c.data.retain)),
            ("weights", c.weights.after),
            ("signed", f"Ed25519 key {c.signature.public_key}" if c.signature else "no"),
            ("for release", " ".join(("yes." if c.releasable else "no.", *cautions))),
        ],
    )
