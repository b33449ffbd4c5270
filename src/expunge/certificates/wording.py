"""A certificate in words: its scope, its warnings and the auditor's statement.

Scope and warnings are part of the certificate and ``verify`` derives them again: their wording
belongs to the schema version (THEORY sections 1, 6 and 7).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from expunge.certificates.people import Commitment
from expunge.certificates.signing import fingerprint
from expunge.display import clean, round_up
from expunge.recipes import is_exact

if TYPE_CHECKING:
    from expunge.certificates.certificate import Certificate

BLOCKS = "Not for release: "
LARGE_EPSILON = 10.0
_MOST_NAMES = 20
_METHODS = {
    "output-perturbation": "output perturbation",
    "gradient-clipping": "noisy fine-tuning with gradient clipping",
    "model-clipping": "noisy fine-tuning with model clipping",
    "retraining": "retraining from a public start",
    "linear-model": "a linear model, solved again from the rows that remain",
    "shards": "an ensemble of networks that never see each other's data",
}
_VOID_ALWAYS = (
    "retained examples, or constants computed before, were derived from forgotten ones",
    "rows, checkpoints or statistics were kept anywhere else and came back from there",
    "the run record became known together with the model",
)
_VOID_NOISY = (
    "a radius, a clip or the centre was chosen by looking at the trained weights or at the "
    "forget data",
    "build(), the loss or the data read the old weights or anything computed from the forget data",
    "more noisy runs of the same old model were released than are counted here",
    "the key of the noise became known",
)
_VOID_EXACT = (
    "the network, the options of training or the choice among several runs was made by looking at "
    "the old model or at the forget data",
    "build() or the training read the old model, its optimizer's state or anything else computed "
    "from the forget data",
)


def find_warnings(c: Certificate) -> Iterator[str]:
    """What a reader must know; whatever begins with :data:`BLOCKS` forbids the release."""
    if is_exact(c.recipe):
        return
    if c.noise.source != "system":
        yield f"{BLOCKS}the noise came from a seed, so anyone who guesses the seed can subtract it."
    if c.grid == 0:
        yield f"{BLOCKS}the run was not on a grid, so its finite precision is not accounted."
    # Whoever publishes one sample of n at random has δ = 1/n: it must be well below.
    n = c.forget.samples + c.retained.samples
    if n and c.delta > 1 / n:
        yield f"{BLOCKS}delta is above 1/{n}, one over the number of samples."
    elif n and c.delta > 1 / (10 * n):
        yield f"Delta is above 1/{10 * n}, a tenth of one over the number of samples."
    if c.epsilon > LARGE_EPSILON:
        yield f"Epsilon is above {LARGE_EPSILON:g}: the bound says little."


def derive_scope(c: Certificate) -> dict[str, tuple[str, ...]]:
    """What is covered, what is not, what rests on the operator, and what would void it."""
    return {
        "covered": tuple(_list_covered(c)),
        "not_covered": tuple(_list_uncovered(c)),
        "operator": tuple(_list_trusted(c)),
        "void_if": (_VOID_EXACT if is_exact(c.recipe) else _VOID_NOISY) + _VOID_ALWAYS,
    }


def _list_covered(c: Certificate) -> Iterator[str]:
    w = c.weights
    yield (
        f"The {c.parameters} certified parameters of the released weights {w.after}, and "
        "everything that can be computed from them."
    )
    # Where the run began, and how the old model entered, if it did.
    centre = "zero" if c.origin == "zero" else f"what build() gave, {w.start}"
    if w.start is None:
        yield "It is a function of public things and of the rows that remain."
    elif c.sharding is not None:
        yield (
            "Each constituent began with what build() gives under a public seed of its own; the "
            f"base that they share is {w.start}. None used the old model."
        )
    elif c.start == "model":
        yield (
            "The old model entered as one vector, which was clipped and noised; the module that "
            f"ran is a new one from build(). Its public centre is {centre}."
        )
        if c.missing:
            yield f"These the old model lacks, and they began there: {_list(c.missing)}."
    else:
        start = "with" if c.start == "build" else "at the public centre,"
        yield f"It began {start} {centre}, and never used the old model."
    if w.adapter is not None:
        yield f"The adapter {w.adapter.hash} alone, on the base {w.adapter.base}."
    if w.files:
        yield f"Files beside the weights, by their hash: {', '.join(w.files)}."
    if (rows := c.statistics) is not None:
        yield (
            f"What is stored of the {rows.samples} rows that remain, {rows.digest}: bit for bit "
            "that of a life without the forget set."
        )
    if (shards := c.sharding) is not None:
        used = len(shards.samples) - shards.samples.count(0)
        yield (
            f"All {used} constituents, trained on {sum(shards.samples)} examples that remain; who "
            f"belongs to which and every order follow from {shards.seed!r}."
        )
        if shards.trained_from:
            kept = shards.trained_from.count(0)
            yield f"{kept} constituents are, bit for bit, those of the parent certificate."
    if c.buffers:
        yield f"The {len(c.buffers)} buffers, estimated again on retained data after the noise."
    if c.training is not None:
        when = "" if is_exact(c.recipe) else " after the last noise, which is post-processing"
        yield f"The training{when}, by {c.training.function}: it was handed retained data only."
    for step in c.applied:
        yield f"What was applied to the released tensors alone: {step.note}."
    if c.releases > 1:
        yield f"All {c.releases} released runs of the same old model together."
    if c.parent is not None:
        yield (
            "The forget sets of the certificates this one is chained to, together with its own, if "
            "the retained data hold nothing of them."
        )


def _list_uncovered(c: Certificate) -> Iterator[str]:
    yield "The old model, copies of it, and any model released before."
    yield "The run record, and anything else measured on the old model or during the run."
    yield "What the retained data, or the tensors that build() gave, say about forgotten examples."
    yield "The size of the forget set and the fact that a request was made."
    if is_exact(c.recipe):
        yield "What models released before and after a request show side by side."
    if c.parent is not None:
        yield (
            "Whether the retained data hold people that earlier certificates forgot; whoever has "
            "the lists of all requests can check that."
        )
    if c.sharding is not None and c.parent is not None:
        yield (
            "Which constituents were trained again, and from which slice: this narrows down whose "
            "examples went, for whoever knows the public string and the names."
        )
    if (public := c.weights.published) is not None:
        compared = f"compared bit for bit with {public.compared}"
        why = "published, says the operator" if public.compared is None else compared
        said = f"The {len(public.names)} released tensors that are as build() gave them, {why}"
        yield f"{said}: {_list(public.names)}."


def _list_trusted(c: Certificate) -> Iterator[str]:
    """What only the operator can know: their code, and what came before it."""
    named = ", ".join(f"{name} {digest}" for name, digest in c.code if digest is not None)
    hashed = f"Its source, hashed with a secret salt: {named}."
    none = "None of it has a source that could be hashed."
    said = "The code of build(), data, training and loss is the operator's."
    yield f"{said} {hashed if named else none}"
    yield (
        "Not seen here: scalers, vocabularies and encoders that were fitted before the data were "
        "handed over, and hyper-parameters that were chosen by looking at those who leave."
    )
    if c.unchanged:
        said = "These have the old model's very bits and were never trained, says the operator"
        yield f"{said}: {_list(c.unchanged)}."
    if c.statistics is not None:
        features = c.statistics.features
        tested = features.get("evaluation") == "tested"
        batches = "in batches of one shape (tested: others change no bit)" if tested else "alone"
        if (network := features.get("network")) is None:
            yield "Inputs are vectors; every row became integers by itself."
        else:
            yield (
                f"The network under the model, {clean(str(network))}, is public, saw no forgotten "
                f"data and is not part of the release; rows were given to it {batches}."
            )
    if c.sharding is not None and not c.environment.deterministic:
        yield (
            "Requests do not depend on models released before: the training is not deterministic, "
            "and what it drew is known to whoever sees the models (Gupta et al. 2021)."
        )
    if is_exact(c.recipe):
        if c.resumed:
            yield "The run went on from a checkpoint, a private file of the operator's."
        yield (
            "Whoever doubts it replays the run where neither the old weights nor the forgotten "
            "rows exist: the same weights come out again on a machine of this kind."
        )


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def name_unseen(c: Certificate) -> str:
    """What the reference never saw: untouched constituents of shards *are* the old model's."""
    return "the forget set" if c.method == "shards" else "the old model"


def list_facts(c: Certificate) -> dict[str, str]:
    """What it claims, line by line, for statement and report; nothing is checked here."""
    exact, ran, delta = is_exact(c.recipe), c.execution, round_up(c.delta)
    asked = "Whatever is asked of the released model, an answer is"
    times = round_up(math.exp(min(c.epsilon, 709.0)))
    steps = getattr(c.recipe, "steps", 1)
    done = f"{steps} noisy step{'s' * (steps != 1)}{' from the centre' * (c.start == 'centre')}"
    done = "without noise" if exact else done
    noise = {} if exact else {
        "noise": f"{c.noise.source}, {c.noise.generator or 'no generator'}, {c.noise.keys} key(s)",
        "finite precision": f"grid {c.grid:.6g}, rounding {ran.rounding:.6g}, tail "
        f"{ran.tail_delta:.6g}; epsilon and delta include them",
        "released runs of this old model": str(c.releases),
    }  # fmt: skip
    return {
        "guarantee": f"epsilon = {round_up(c.epsilon)}, delta = {delta}",
        "it means": f"{asked} exactly as likely as under the reference."
        if c.epsilon == 0 and c.delta == 0
        else f"{asked} at most {times} times as likely as under the reference, plus {delta}; and "
        "the same with the two exchanged.",
        "reference": _name_reference(c),
        "theorem": c.theorem,
        "survival": f"At most {round_up(100 * c.survival_bound, 3)} % of runs can differ, in any "
        f"way, from runs that never saw {name_unseen(c)}.",
        "method": f"{_METHODS[c.method]}; {done}, on {c.parameters} parameters",
        "forgotten": _name_people(c.forget),
        "retained": _name_people(c.retained),
        **noise,
        "weights": c.weights.after,
        "certificate": c.digest,
        "parent certificate": c.parent or "none",
        "date": c.created,
        "signature": f"the key {fingerprint(c.signature.public_key)}" if c.signature else "none",
        "for release": " ".join(("yes." if c.releasable else "no.", *c.warnings)),
    }


def write_statement(c: Certificate) -> str:
    """The certificate for an auditor, in plain language."""
    lines = [
        "CERTIFICATE OF UNLEARNING",
        "What it claims; expunge verify checks it.",
        "",
        *(f"*** {warning} ***" for warning in c.warnings),
        *(f"{name.capitalize()}: {fact}" for name, fact in list_facts(c).items()),
    ]
    for title, sentences in (
        ("Covered:", c.scope.covered),
        ("Not covered:", c.scope.not_covered),
        ("The operator's word:", c.scope.operator),
        ("This certificate is void if", c.scope.void_if),
    ):
        lines += ["", title, *(f"- {sentence}" for sentence in sentences)]
    return "\n".join(map(clean, lines)) + "\n"


def _name_reference(c: Certificate) -> str:
    """The certifying algorithm in words."""
    if is_exact(c.recipe):
        return "the same computation on the examples that remain, and on nothing else"
    if c.compared_to == "retrained":
        return "the same run started from a model retrained without the forget set"
    if c.method == "model-clipping":
        return "the same run with the public centre and nothing else before its first noise"
    return "the same run started from the public centre, which never saw the forget set"


def _name_people(commitment: Commitment) -> str:
    count, n = commitment.count, commitment.samples
    return f"{count} {'person' if count == 1 else 'people'} on {n} sample{'s' * (n != 1)}"
