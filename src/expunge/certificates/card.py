"""A certificate as a block for a Hugging Face model card: YAML metadata, then markdown."""

from __future__ import annotations

import json

from expunge.certificates.schema import CertificateWire
from expunge.certificates.wording import list_facts, name_method, name_reference, name_set
from expunge.display import round_up


def write_model_card(certificate: CertificateWire) -> str:
    """A block for a Hugging Face model card: YAML metadata, then markdown."""
    c = certificate
    return "\n".join(
        [
            "---",
            "tags:",
            "- machine-unlearning",
            "- certified-unlearning",
            "certified_unlearning:",
            *(f"  {key}: {_yaml(value)}" for key, value in list_facts(c).items()),
            "---",
            "",
            "## Certified unlearning",
            "",
            *(f"> **{warning}**\n" for warning in c.warnings),
            f"Examples were removed from this model by {name_method(c)} with "
            f"**epsilon = {round_up(c.epsilon)}, delta = {round_up(c.delta)}**, compared to "
            f"{name_reference(c)}.",
            "",
            "| | |",
            "|---|---|",
            f"| theorem | {c.theorem} |",
            f"| survival bound | {round_up(c.survival_bound, 4)} |",
            f"| certified parameters | {c.parameters} |",
            f"| forget set | {name_set(c.data.forget)} |",
            f"| weights (tree hash) | `{c.weights.after}` |",
            f"| certificate digest | `{c.digest}` |",
            "",
            f"Check it with `expunge verify certificate.json --weights {_name_weights(c)}`.",
            "",
            "Not covered:",
            "",
            *(f"- {sentence}" for sentence in c.scope.not_covered),
            "",
            *(["It rests on:", ""] if c.scope.assumptions else []),
            *(f"- {sentence}" for sentence in c.scope.assumptions),
            *([""] if c.scope.assumptions else []),
        ]
    )


def _yaml(value: object) -> str:
    """A scalar that YAML 1.1 reads back as the same value (1e-05 alone would be text)."""
    text = json.dumps(value)
    if isinstance(value, float) and "e" in text and "." not in text:
        return text.replace("e", ".0e")
    return text


def _name_weights(certificate: CertificateWire) -> str:
    alone = certificate.weights.adapter is not None
    return "adapter_model.safetensors" if alone else "model.safetensors"
