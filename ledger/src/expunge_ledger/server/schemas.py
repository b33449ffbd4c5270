"""What programs send and get beside the ledger's own objects, and what is refused how."""

from __future__ import annotations

import re
from datetime import date, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from starlette.exceptions import HTTPException

from expunge_ledger.clocks import Pace
from expunge_ledger.registry import Role
from expunge_ledger.requests import Request

Text = Annotated[str, StringConstraints(min_length=1, max_length=2_000)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=100)]
Stage = Literal[
    "waiting", "busy", "taken", "looking", "forgetting", "checking", "done", "nothing", "failed"
]


class RefusedError(HTTPException):
    """A request that is not done; ``wait`` is after how many seconds it may be tried again."""

    def __init__(self, status: int, sentence: str, wait: int = 0) -> None:
        headers = {"Retry-After": str(wait)} if wait else {}
        headers |= {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        super().__init__(status, sentence, headers)

    def __str__(self) -> str:
        return str(self.detail)


def describe_problems(problems: Any) -> str:
    """What a validation found, without the values: they may name a person."""
    said = list[str]()
    for problem in problems[:5]:
        place = [str(part) for part in problem["loc"] if part not in ("body", "query", "path")]
        name = ".".join(place) if all(part.isidentifier() for part in place) else "a field"
        unknown = problem["type"] == "extra_forbidden"
        what = "it is not known here" if unknown else problem["msg"]
        said.append(f"{name or 'the body'}: {what}")
    return "; ".join(said)


def read_day(given: object) -> object:
    """A day as it is written in JSON: one way, no number of seconds and no time of a zone."""
    if not isinstance(given, str) or not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", given):
        raise ValueError("it must be a date such as 2026-01-31")
    return given


Day = Annotated[date, BeforeValidator(read_day)]


class Sent(BaseModel):
    """Unknown fields are refused, a number is no text and no date."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)


class PersonSent(Sent):
    """A person, by the identifier that the models know."""

    person: Annotated[str, StringConstraints(min_length=1, max_length=1_024)]


class RequestSent(PersonSent):
    """A request to forget a person in one model, or in all."""

    model: Name | None = None
    received: Day | None = Field(None, description="Default: today.")
    due: Day | None = Field(None, description="Default: one month after it was received.")
    reason: Text | None = Field(None, description="Kept sealed; only operators can read it.")


class WhySent(Sent):
    """Why a request is refused or withdrawn; whoever may see the request reads it."""

    reason: Text | None = None


class Me(BaseModel):
    """Who this token is, and the models it may name."""

    name: str
    role: Role
    model: str | None
    models: list[str]


class Requests(BaseModel):
    """A page of requests, how many there are in all, and how many wait at which pace."""

    requests: list[Request]
    total: int
    page: int = 1
    waiting: dict[Pace, int] = {}


class EventShown(BaseModel):
    """A link of the chain; of its body what names no others and no places."""

    number: int
    at: datetime
    kind: str
    body: dict[str, Any]
    hash: str


class Reason(BaseModel):
    """What was sent with a request."""

    reason: str | None


class Progress(BaseModel):
    """How far the work on a model is; said is for operators."""

    model: str
    stage: Stage
    since: datetime
    said: str = ""
    over: bool = False


class Verdict(BaseModel):
    """Whether it holds, and what differs if not; releases is how many were verified."""

    holds: bool
    differences: list[str]
    releases: int
    events: int | None = None
    head: str | None = None


class Refused(BaseModel):
    """Why nothing was done."""

    detail: str
