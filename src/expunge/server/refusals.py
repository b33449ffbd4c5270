"""What is refused, with which status: one sentence, which never repeats what was sent."""

from __future__ import annotations

from typing import Any

from expunge.errors import ExpungeError, InputError, RunError


class RefusedError(Exception):
    """A request that is not done; ``wait`` is after how many seconds it may be tried again."""

    def __init__(self, status: int, sentence: str, wait: int = 0) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.wait = status, sentence, wait


def translate(error: ExpungeError) -> RefusedError:
    """The status of an error of the library: bad input, not possible now, or try again."""
    match error:
        case InputError():
            return RefusedError(422, str(error))
        case RunError():
            return RefusedError(503, "the ledger does not answer; try again later", 5)
        case _:
            return RefusedError(409, str(error))


def describe_problems(problems: Any) -> str:
    """What a validation found, without the values: they may name a person."""
    told = list[str]()
    for problem in problems[:5]:
        place = [str(part) for part in problem["loc"] if part not in ("body", "query", "path")]
        known = ".".join(place) if all(part.isidentifier() for part in place) else "a field"
        said = "it is not known here" if problem["type"] == "extra_forbidden" else problem["msg"]
        told.append(f"{known or 'the body'}: {said}")
    return "; ".join(told)
