"""A certificate in words: its scope, its warnings and the auditor's statement.

Scope and warnings are part of the certificate and ``verify`` derives them again: their wording
belongs to the schema version (THEORY sections 1, 6 and 7).
"""

from __future__ import annotations

import math
from typing import Any

from expunge.accounting.guarantee import is_exact
from expunge.accounting.precision import DPSGD_ASSUMPTIONS, describe_assumptions
from expunge.certificates.hashing import combine_leaves
from expunge.certificates.record import decode
from expunge.certificates.schema import (
    CertificateWire,
    CommitmentWire,
    PublicWire,
    ScopeWire,
    ShardingWire,
    name_centre,
)
from expunge.display import round_up
from expunge.recipes import (
    GradientClipping,
    GroupDPSGD,
    NoisyDescent,
    Problem,
    Recipe,
    Retraining,
    RewindToDelete,
    ShardedTraining,
    from_dict,
)

METHOD_WORDS = {
    "output-perturbation": "output perturbation",
    "gradient-clipping": "noisy fine-tuning with gradient clipping",
    "model-clipping": "noisy fine-tuning with model clipping",
    "retraining": "retraining",
    "group-dp-sgd": "DP-SGD and group privacy",
    "noisy-descent": "noisy full-batch descent",
    "rewind-to-delete": "rewinding full-batch descent, with noise at the end",
    "exact-statistics": "ridge regression from exact integer sums",
    "convex-head": "a strongly convex head on public features",
    "shards": "an ensemble of networks that never see each other's data",
}

# Their guarantee covers the training too, so the reference is that training without the forget set.
TRAINING_METHODS = ("group-dp-sgd", "noisy-descent", "rewind-to-delete")

_VOID_IF = (
    "a radius, a clip or the centre was chosen by looking at the trained weights or at the "
    "forget data",
    "optimizer moments, averaged weights, normalisation statistics or any other state of the "
    "original training was kept",
    "the noisy steps were not the recipe's: momentum, an adaptive optimizer, a noise draw used "
    "twice, a noise source that can be guessed",
    "forget data reached the retained data, its normalisation constants or the choice among "
    "several runs",
    "the centre or a frozen part depended on the forget data",
    "more noisy runs of the same old model were released than are counted here",
    "the key of the noise, the run record or its trace became known together with the model",
)

_VOID_IF_RETRAINING = (
    "the start, the network or the options of training were chosen by looking at the old model or "
    "at the forget data",
    "build(), the public weights or a frozen part hold anything that was computed from the forget "
    "data",
    "optimizer moments, averaged weights, normalisation statistics or any other state of the "
    "original training was kept",
    "forget data reached the retained data, its normalisation constants or the choice among "
    "several runs",
    "the run record became known together with the model",
)
_DRAWN = (
    "assumed: the start was drawn from its seed and from nothing that saw data; whoever has the "
    "code can draw it again."
)
_PUBLISHED = (
    "assumed: the public weights of the start saw no forgotten data; nobody but their publisher "
    "knows."
)

_VOID_IF_HEAD = (
    "the network, the quantisation, the seed, the classes or the ridge was chosen by looking at "
    "the forget data",
    "rows were stored or summed anywhere else and came back from there",
    "retained rows were derived from forgotten ones",
    "the key of the noise or the run record became known together with the model",
)
_VOID_IF_NOISY_HEAD = (
    *_VOID_IF_HEAD,
    "more noisy releases were made from one start (a copied state) than are counted here",
)

_VOID_IF_SHARDS = (
    "the public string, the number of shards or slices, the network or the training was chosen by "
    "looking at the forget data",
    "build(), the training function, prepare, augment or the loss holds anything that was computed "
    "from the data: weights, normalisation or class constants",
    "examples or checkpoints were kept anywhere else and came back from there",
    "retained examples were derived from forgotten ones",
)
_ONE_THREAD = (
    "computed: constituents were trained on one thread with deterministic arithmetic; the bits "
    "hold for the versions named here, on machines of this kind."
)
_SAME_CODE = (
    "assumed: build(), training, prepare, augment and loss keep nothing from one call to the next "
    "(tested on public noise, before and after every training)."
)
_SECRET = (
    "assumed: requests do not depend on models released before. The training is not "
    "deterministic, and what it drew is known to whoever sees the models (Gupta et al. 2021)."
)

_PUBLIC_FEATURES = (
    "assumed: the feature map is public: network, bits, lift and seed saw no forgotten data."
)
_ALONE = "computed: every row was given to the network alone."
_IN_BATCHES = (
    "tested: rows were given to the network in batches of one shape; moving a row and replacing "
    "the others changed no bit of public noise."
)
_KEEPS_NOTHING = (
    "assumed: the network keeps nothing from one call to the next (tested on public noise and on "
    "a few rows again)."
)
_VECTORS = "computed: inputs are vectors; every row was rounded by itself."

BLOCKS = "Not for release: "
LARGE_EPSILON = 10.0
_UNCHECKED = {
    "data": "that the retained data hold no identifier of the forget set",
    "finetune": "that the data of the fine-tuning hold no identifier of the forget set",
}


def find_warnings(certificate: CertificateWire) -> tuple[str, ...]:
    """What a reader must know; whatever begins with :data:`BLOCKS` forbids the release."""
    c, found = certificate, list[str]()
    noisy = not is_exact(read_recipe(c))
    if noisy and c.noise.source != "system":
        found.append(
            f"{BLOCKS}the noise came from a seed, so anyone who guesses the seed can subtract it."
        )
    if noisy and c.finite_precision.grid == 0:
        found.append(
            f"{BLOCKS}the run was not on a grid, so its finite precision is not accounted."
        )
    if c.schema_version > 1:
        found += _warn_of_unchecked(c) + _warn_of_numbers(c)
    return tuple(found)


def find_cautions(certificate: CertificateWire) -> tuple[str, ...]:
    """What the certificate itself cannot say: that it is of an earlier version."""
    if certificate.schema_version > 1:
        return ()
    return (
        "A certificate of version 1: what its file holds beside the certified parameters, and what "
        "the retained data hold, was not compared.",
    )


def allows_release(warnings: tuple[str, ...]) -> bool:
    """Whether none of the warnings forbids the release."""
    return not any(warning.startswith(BLOCKS) for warning in warnings)


def find_unchecked(certificate: CertificateWire) -> list[str]:
    """What nobody could check about this run's data, as ends of sentences."""
    c, found = certificate, list[str]()
    if not c.data.checked and c.recipe.method != "group-dp-sgd":  # it runs nothing on request
        found.append(_UNCHECKED["data"])
    if c.finetune is not None and not c.finetune.checked and c.recipe.method != "retraining":
        found.append(_UNCHECKED["finetune"])
    return found


def _warn_of_unchecked(certificate: CertificateWire) -> list[str]:
    unchecked = find_unchecked(certificate)
    if certificate.accepted_unchecked:
        return [f"Not checked, and accepted by the operator: {what}." for what in unchecked]
    return [f"{BLOCKS}it was not checked {what}." for what in unchecked]


def _warn_of_numbers(certificate: CertificateWire) -> list[str]:
    """δ must be well below 1/n: whoever publishes one sample of n at random has δ = 1/n."""
    c, found = certificate, list[str]()
    if is_exact(read_recipe(c)):
        return found
    sets = [s for s in (c.data.forget, c.data.retain) if s is not None]
    n = sum(s.count if s.samples is None else s.samples for s in sets)
    n += 0 if c.statistics is None else c.statistics.samples
    if n and c.delta > 1 / n:
        found.append(f"{BLOCKS}delta is above 1/{n}, one over the number of samples.")
    elif n and c.delta > 1 / (10 * n):
        found.append(f"Delta is above 1/{10 * n}, a tenth of one over the number of samples.")
    if c.epsilon > LARGE_EPSILON:
        found.append(f"Epsilon is above {LARGE_EPSILON:g}: the bound says little.")
    return found


def derive_scope(certificate: CertificateWire) -> ScopeWire:
    """What is covered, what is not, and what would void it."""
    c, head = certificate, certificate.statistics
    covered = [
        f"The {c.parameters} certified parameters of the released weights {c.weights.after}.",
        "Every event about these weights, hence everything that can be computed from them.",
    ]
    if c.weights.origin is not None:
        covered.append(f"Its public centre is {name_centre(c.weights)}.")
    trained = c.recipe.method == "retraining" and c.schema_version > 1
    if trained:
        covered += _describe_retraining(c)
    elif c.start == "centre":
        covered.append("This run started at the public centre and never used the old model.")
    elif c.start == "fresh" and c.shards is None:
        covered.append("This run started from weights that depend on no data at all.")
    if c.weights.adapter is not None:
        a = c.weights.adapter
        covered.append(f"The adapter {a.hash} alone, configured by {a.config}, on base {a.base}.")
    if c.buffers.policy == "reset" and trained:
        covered.append(
            f"The {len(c.buffers.names)} buffers, which began anew and saw retained data only."
        )
    elif c.buffers.policy == "reset":
        covered.append(
            f"The {len(c.buffers.names)} buffers, which were estimated again on retained data "
            "after the last noise."
        )
    if head is not None:
        covered.append(
            f"The exact sums of the {head.samples} rows that remain, {head.digest}: bit for bit "
            "those of a life without the forget set."
        )
    if c.shards is not None:
        covered += _describe_shards(c, c.shards)
    if c.finetune is not None:
        covered.append(_describe_tuning(c))
    if c.releases > 1:
        covered.append(f"All {c.releases} released runs of the same old model together.")
    if c.parent is not None:
        covered.append(
            "The forget sets of the certificates this one is chained to, together with its own"
            + (
                ": the bound holds whatever the run started from."
                if c.schema_version == 1
                else ", if the retained data hold nothing of them."
            )
        )
    not_covered = [
        "The old model, copies of it, and any model released before.",
        "The run record, its trace and anything else measured on the old model or during the run.",
        "What the retained data, the centre or a frozen part say about the forgotten examples.",
        "The size of the forget set and the fact that a request was made.",
    ]
    if c.schema_version > 1:
        not_covered.append(
            "The code of model, loss and data set, with the numbers and objects it holds beside "
            "tensors: they are taken to be public."
        )
    if c.schema_version > 1 and c.parent is not None:
        not_covered.append(
            "Whether the retained data hold people that earlier certificates forgot; whoever "
            "holds the lists of all requests can check that."
        )
    if head is not None:
        not_covered += [
            "The public network under the head, which is not part of the release: "
            f"{head.features['network'] or 'none, inputs are vectors'}.",
            _SIDE_BY_SIDE,
        ]
    if c.shards is not None:
        not_covered.append(_SIDE_BY_SIDE)
        if c.parent is not None:
            not_covered.append(
                "Which constituents were trained again, and from which slice: this narrows down "
                "whose examples went, for whoever knows the public string and the identifiers."
            )
    if c.weights.public is not None and c.shards is not None:
        not_covered.append(
            "Where the tensors come from that the public string does not draw: "
            + _describe_public(c.weights.public, "of the start")
        )
    elif c.weights.public is not None:
        not_covered.append(_describe_public(c.weights.public))
    elif c.weights.frozen is not None:
        not_covered.append(
            f"The {len(c.weights.frozen_names)} frozen tensors, which are declared public: "
            f"{c.weights.frozen}."
        )
    if c.buffers.policy == "frozen":
        not_covered.append(f"The {len(c.buffers.names)} buffers, which are declared public.")
    return ScopeWire(
        covered=tuple(covered),
        not_covered=tuple(not_covered),
        assumptions=_list_assumptions(c),
        void_if=_choose_voids(c),
    )


def _describe_retraining(certificate: CertificateWire) -> list[str]:
    """Where the training started, and that nothing is lost at δ = 0 either."""
    c, told = certificate, certificate.initialisation or "not told"
    start = (
        f"This run started from public weights, {c.weights.centre} ({told}), and never used the "
        "old model."
        if c.start == "centre"
        else f"This run started from weights that depend on no data at all ({told})."
    )
    return [start, "It holds with delta = 0 too: the old model is no input of this run."]


_SIDE_BY_SIDE = "What models released before and after a request show side by side."


def _choose_voids(certificate: CertificateWire) -> tuple[str, ...]:
    if certificate.shards is not None:
        return _VOID_IF_SHARDS
    if certificate.recipe.method == "retraining" and certificate.schema_version > 1:
        return _VOID_IF_RETRAINING
    if certificate.statistics is None:
        return _VOID_IF
    return _VOID_IF_HEAD if is_exact(read_recipe(certificate)) else _VOID_IF_NOISY_HEAD


def _describe_shards(certificate: CertificateWire, sharding: ShardingWire) -> list[str]:
    used = sum(1 for held in sharding.hashes if held != combine_leaves([]))
    found = [
        f"All {used} constituents, trained on {sum(sharding.samples)} examples that remain; who "
        f"belongs to which and every order follow from {sharding.seed!r}.",
        "They start from what build() draws under that string"
        + (
            ", and from nothing else."
            if certificate.weights.public is None
            else f", and from public tensors, {certificate.weights.public.hash}."
        ),
    ]
    if sharding.trained_from:
        kept = sum(1 for first in sharding.trained_from if first == 0)
        found.append(f"{kept} constituents are, bit for bit, those of the parent certificate.")
    return found


def _describe_tuning(certificate: CertificateWire) -> str:
    """Training after the last noise: what it may be called depends on what was checked."""
    retrained, old = certificate.recipe.method == "retraining", certificate.schema_version == 1
    if certificate.shards is not None:
        return (
            "The distillation into one network, which used the ensemble and retained examples "
            "only, so it is post-processing."
        )
    if old or not find_unchecked(certificate):
        if retrained:
            return "The training, which used retained data only."
        return (
            "The fine-tuning after the last noise: it used retained data only, so it is "
            "post-processing."
        )
    what = "training" if retrained else "fine-tuning after the last noise"
    return f"The {what}, if its data hold nothing of the forget set: that was not checked."


def _describe_public(public: PublicWire, which: str = "that are not certified") -> str:
    shown = ", ".join(public.names[:20])
    if len(public.names) > 20:
        shown += f" and {len(public.names) - 20} more"
    why = (
        f"compared bit for bit with {public.source}"
        if public.compared
        else "declared public by the operator, not compared"
    )
    return f"The {len(public.names)} tensors {which}, {why}: {shown}."


def _list_assumptions(certificate: CertificateWire) -> tuple[str, ...]:
    """What the guarantee rests on beside the run itself: nothing, for the clipping methods."""
    problem = certificate.problem
    match read_recipe(certificate):
        case GroupDPSGD():
            return DPSGD_ASSUMPTIONS
        case (NoisyDescent() | RewindToDelete()) as recipe if problem is not None:
            return tuple(describe_assumptions(recipe, Problem(**problem.model_dump())))
        case _ if certificate.statistics is not None:
            told = certificate.statistics.features
            if told["network"] is None:
                return (_PUBLIC_FEATURES, _VECTORS)
            how = _ALONE if told["evaluation"] == "by construction" else _IN_BATCHES
            return (_PUBLIC_FEATURES, how, _KEEPS_NOTHING)
        case Retraining() if certificate.schema_version > 1:
            return (_PUBLISHED if certificate.start == "centre" else _DRAWN,)
        case ShardedTraining():
            sure = certificate.shards is not None and certificate.shards.deterministic
            told = [_ONE_THREAD if sure else _SECRET, _SAME_CODE]
            if certificate.weights.public is not None:
                told.append(
                    "assumed: the tensors that the public string does not draw saw no forgotten "
                    "data; nobody but their publisher knows."
                )
            return tuple(told)
        case _:
            return ()


def read_recipe(certificate: CertificateWire) -> Recipe:
    """The recipe of a certificate, as the accountant takes it."""
    return from_dict(decode(certificate.recipe.model_dump()))


def name_method(certificate: CertificateWire) -> str:
    """The method in words; retraining from public weights is a restart."""
    restarted = certificate.recipe.method == "retraining" and certificate.start == "centre"
    return "a restart from public weights" if restarted else METHOD_WORDS[certificate.recipe.method]


def name_reference(certificate: CertificateWire) -> str:
    """The certifying algorithm in words."""
    if certificate.recipe.method == "retraining" and certificate.start == "centre":
        return "training again without the forget set, from the same public weights"
    if certificate.recipe.method == "retraining":
        return "training again without the forget set"
    if certificate.recipe.method == "shards":
        return "the same ensemble, trained on the examples that remain and nothing else"
    if certificate.statistics is not None and is_exact(read_recipe(certificate)):
        return "the same head, learned from the rows that remain and nothing else"
    if certificate.statistics is not None:
        return "the exact minimiser on the rows that remain, with the same noise"
    if certificate.recipe.method in TRAINING_METHODS:
        return "the same steps with the same noise, all on the retained data"
    if certificate.compared_to == "retrained":
        return "the same run started from a model retrained without the forget set"
    if certificate.recipe.method == "model-clipping":
        return (
            "the same run with the public centre and nothing else before its first noise, "
            "which never saw the forget set"
        )
    return "the same run started from the public centre, which never saw the forget set"


def _state_guarantee(c: CertificateWire) -> list[str]:
    epsilon, delta = round_up(c.epsilon), round_up(c.delta)
    if c.epsilon == 0 and is_exact(read_recipe(c)):
        return [
            f"Guarantee: epsilon = 0, delta = {delta}; it holds with delta = 0 too.",
            "Whatever is asked of the released model, an answer is exactly as likely as under the",
            "reference.",
        ]
    times = round_up(math.exp(min(c.epsilon, 709.0)))
    return [
        f"Guarantee: epsilon = {epsilon}, delta = {delta}.",
        f"Whatever is asked of the released model, an answer is at most {times} times as likely",
        f"as under the reference, plus {delta}; and the same with the two exchanged.",
    ]


def _state_noise(c: CertificateWire) -> list[str]:
    if c.noise.keys == 0:
        return [f"Noise: {c.noise.source}."]
    p = c.finite_precision
    return [
        f"Noise: {c.noise.source}, {c.noise.generator or 'no generator'}, {c.noise.keys} key(s).",
        f"Finite precision: grid {p.grid:.6g}, rounding {p.rounding:.6g}, tail {p.tail_delta:.6g};",
        f"together they cost {round_up(p.epsilon_cost, 3)} of epsilon.",
    ]


def write_statement(certificate: CertificateWire) -> str:
    """The certificate for an auditor, in plain language."""
    c = certificate
    chance = f"{round_up(100 * c.survival_bound, 3)} %"
    lines = [
        "CERTIFICATE OF UNLEARNING",
        "",
        *(f"*** {warning} ***" for warning in (*c.warnings, *find_cautions(c))),
        *_state_guarantee(c),
        f"Reference: {name_reference(c)}.",
        f"Theorem: {c.theorem}.",
        f"At most {chance} of runs can differ, in any way, from runs that never saw "
        f"{name_unseen(c)}.",
        "",
        f"Method: {name_method(c)}; {count_steps(c)} on {c.parameters} parameters.",
        f"Forget set: {name_set(c.data.forget)}. Retained set: {name_set(c.data.retain)}.",
        *_state_noise(c),
        f"Released runs of this old model: {c.releases}. Run finished: {c.created}.",
        f"Parent certificate: {c.parent or 'none'}.",
        f"Weights: {c.weights.after}",
        f"Certificate: {c.digest}",
        f"Signature: {'Ed25519 key ' + c.signature.public_key if c.signature else 'none'}",
        "",
        "Covered:",
        *(f"- {sentence}" for sentence in c.scope.covered),
        "Not covered:",
        *(f"- {sentence}" for sentence in c.scope.not_covered),
        *(["It rests on:"] if c.scope.assumptions else []),
        *(f"- {sentence}" for sentence in c.scope.assumptions),
        "This certificate is void if",
        *(f"- {sentence}," for sentence in c.scope.void_if[:-1]),
        f"- or {c.scope.void_if[-1]}.",
    ]
    return "\n".join(lines) + "\n"


def name_unseen(certificate: CertificateWire) -> str:
    """What the reference never saw: untouched constituents of shards *are* the old model's."""
    trains = certificate.recipe.method in (*TRAINING_METHODS, "shards")
    return "the forget set" if trains else "the old model"


def list_facts(certificate: CertificateWire) -> dict[str, Any]:
    """What a weights file and a model card repeat of the certificate."""
    return {
        "epsilon": certificate.epsilon,
        "delta": certificate.delta,
        "compared_to": certificate.compared_to,
        "method": certificate.recipe.method,
        "releasable": certificate.releasable,
        "weights": certificate.weights.after,
        "certificate": certificate.digest,
    }


def count_steps(certificate: CertificateWire) -> str:
    recipe = read_recipe(certificate)
    if isinstance(recipe, RewindToDelete):
        return f"{recipe.train_steps} full-batch steps and one noise"
    steps = sum(run.steps for run in certificate.schedule)
    told = (certificate.statistics, certificate.shards)
    if told != (None, None) or isinstance(recipe, Retraining):
        return "one noise" if steps else "without noise"
    noun = "noisy step" if steps == 1 else "noisy steps"
    start = ", started at the centre" if certificate.start == "centre" else ""
    clips = isinstance(recipe, GradientClipping) and recipe.model_clip
    return f"{steps} {noun}{' and projection' if clips else ''}{start}"


def name_set(commitment: CommitmentWire | None) -> str:
    if commitment is None:
        return "not recorded"
    people, n = "person" if commitment.count == 1 else "people", commitment.samples
    samples = "samples that were not counted" if n is None else f"{n} sample{'s' * (n != 1)}"
    return f"{commitment.count} {people} on {samples}, committed to by identifier"
