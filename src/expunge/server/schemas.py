"""What programs send and get: the schemas of the OpenAPI document."""

from __future__ import annotations

import re
from datetime import date, datetime
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from expunge.ledger.clocks import Pace
from expunge.ledger.models import Kind, Model, Release
from expunge.ledger.requests import Request, State
from expunge.ledger.tokens import Role
from expunge.server.desk import Progress, Stage

Text = Annotated[str, StringConstraints(min_length=1, max_length=2_000)]
Identifier = Annotated[str, StringConstraints(min_length=1, max_length=1_024)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=100)]


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

    person: Identifier


class RequestSent(PersonSent):
    """A request to forget a person in one model, or in all."""

    model: Name | None = None
    received: Day | None = Field(None, description="Default: today.")
    due: Day | None = Field(None, description="Default: one month after it was received.")
    reason: Text | None = Field(None, description="Kept sealed; only operators can read it.")


class WhySent(Sent):
    """Why a request is refused; whoever may see the request reads it."""

    reason: Text


class WithdrawalSent(Sent):
    """Why a request is withdrawn, if the person said so."""

    reason: Text | None = None


class MeShown(BaseModel):
    """Who this token is, and the models it may name."""

    name: str
    role: Role
    model: str | None
    models: list[str]


class AnswerShown(BaseModel):
    """What a request asks of one model: outcome is null until that is done."""

    model: str
    state: str
    outcome: str | None
    release: int | None
    certificate: str | None


class RequestShown(BaseModel):
    """A request as it stands; person is a keyed hash."""

    number: int
    person: str
    state: State
    answer: str | None
    model: str | None
    received: date
    due: date
    filed: datetime
    ended: datetime | None
    pace: Pace
    days: int
    why: str | None
    answers: list[AnswerShown]
    new: bool

    @classmethod
    def of(cls, found: Request) -> RequestShown:
        """All but the reason."""
        plain: dict[str, Any] = {
            name: getattr(found, name)
            for name in cls.model_fields
            if name not in ("pace", "days", "answers")
        }
        answers = [
            AnswerShown(**{name: getattr(one, name) for name in AnswerShown.model_fields})
            for one in found.answers
        ]
        return cls(**plain, pace=found.clock.pace, days=found.clock.days, answers=answers)


class RequestsShown(BaseModel):
    """A page of requests, and how many there are in all."""

    requests: list[RequestShown]
    total: int
    page: int
    waiting: dict[Pace, int]


class EventShown(BaseModel):
    """A link of the chain; the body is empty but for the model where it names others."""

    number: int
    at: datetime
    kind: str
    body: dict[str, Any]
    hash: str


class ReasonShown(BaseModel):
    """What was sent with a request."""

    reason: str | None


class ReleaseShown(BaseModel):
    """A release: its certificate's SHA-256, the one it is chained to, and who asked for it."""

    number: int
    certificate: str
    parent: str | None
    finished: datetime
    requests: list[int]
    replay: bool

    @classmethod
    def of(cls, found: Release) -> ReleaseShown:
        """All but where it lies."""
        return cls(**{name: getattr(found, name) for name in cls.model_fields})


class ModelShown(BaseModel):
    """A registered model, and its chain of releases; retired is when it was withdrawn."""

    name: str
    kind: Kind
    registered: datetime
    open: int
    running: int
    retired: datetime | None
    releases: list[ReleaseShown]

    @classmethod
    def of(cls, found: Model) -> ModelShown:
        """All but where it lies."""
        plain = {name: getattr(found, name) for name in cls.model_fields if name != "releases"}
        return cls(**plain, releases=[ReleaseShown.of(one) for one in found.releases])


class ProgressShown(BaseModel):
    """How far the work on a model is."""

    model: str
    stage: Stage
    since: datetime
    over: bool
    said: str

    @classmethod
    def of(cls, found: Progress) -> ProgressShown:
        """All of it."""
        return cls(**{name: getattr(found, name) for name in cls.model_fields})


class VerifiedShown(BaseModel):
    """Whether it holds, and what differs if not; ``releases`` is how many were verified."""

    holds: bool
    differences: list[str]
    releases: int
    events: int | None = None
    head: str | None = None


class RefusedShown(BaseModel):
    """Why nothing was done."""

    detail: str
