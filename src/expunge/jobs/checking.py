"""``expunge check``: all that a job would be refused for, at once; nothing is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import expunge
from expunge.errors import collecting
from expunge.files import check_free
from expunge.jobs.jobfile import JobFile, read_job, refuse_mistakes
from expunge.jobs.learning import make_learner, split_examples
from expunge.jobs.loading import explaining, importing_from
from expunge.jobs.request import Request, check_second, load_data, load_request
from expunge.jobs.tables import LearnJob, NoisyTable, ShardsJob, UnlearnJob

ROWS = 32  # that a linear model tries


def check_job(path: str | Path) -> list[str]:
    """What the job would run on, one sentence each; one error names everything in its way."""
    made = read_job(path)
    with importing_from(made.folder):
        if isinstance(made.job, UnlearnJob):
            facts = _check_unlearn(made.of(UnlearnJob))
        else:
            facts = _check_learn(made.of(LearnJob))
    return [f"method: {made.job.method.name}", *facts]


def _check_unlearn(made: JobFile[UnlearnJob]) -> list[str]:
    job, problems = made.job, list[str]()
    target = made.locate(job.output.dir)
    with collecting(problems):
        check_free(target)
    request = load_request(made, before=problems)
    found = expunge.check(
        request.build,
        request.data,
        old=request.old,
        strict=job.model.strict,
        **request.batches,
        **request.options,
    )
    facts = list(found.facts)
    if isinstance(job.method, NoisyTable) and not found.problems:
        with collecting(problems):
            check_second(made, request, target)
        with collecting(problems):
            facts.append(_describe_noise(request, job.method))
    refuse_mistakes(made.path, [*problems, *found.problems])
    return facts


def _describe_noise(request: Request, method: NoisyTable) -> str:
    """What the noisy run would certify, planned or calibrated for this very network."""
    from expunge.networks.building import call_build
    from expunge.networks.tensors import list_trainable
    from expunge.noisy.choice import choose_recipe

    start = {n: p.detach() for n, p in list_trainable(call_build(request.build)).items()}
    asked: dict[str, Any] = {"delta": method.delta, "compared_to": method.compared_to}
    more: dict[str, Any] = {"method": method.name, "releases": method.releases}
    recipe, execution, _ = choose_recipe(
        method.recipe, start, epsilon=method.epsilon, **more, **asked
    )
    found = expunge.guarantee(recipe, execution=execution, **asked)
    return (
        f"certifies epsilon = {found.epsilon:.6g} at delta = {found.delta:g}; at most "
        f"{100 * found.survival_bound:.1f} % of runs can differ in any way from runs that never "
        "saw the old model"
    )


def _check_learn(made: JobFile[LearnJob]) -> list[str]:
    job, problems, found = made.job, list[str](), dict[str, Any]()
    with collecting(problems):
        found["learner"] = make_learner(made, state=None)
    with collecting(problems):
        found["data"] = load_data(made)
    refuse_mistakes(made.path, problems)
    learner, data = found["learner"], found["data"]
    if isinstance(job, ShardsJob):
        checked = expunge.check(learner.plan.build, data, train=learner.plan.train)
        refuse_mistakes(made.path, list(checked.problems))
        return list(checked.facts)
    first = data if data.stream else data.take(range(min(ROWS, len(data))))
    with collecting(problems), explaining("one batch failed"):
        learner.partial_fit(*split_examples(first), ids=first.ids)
    refuse_mistakes(made.path, problems)
    shown = f"data: {len(data)} examples of {len(data.people)} people"
    return [shown, f"one batch: {len(first)} rows"]
