"""Who may do what, and who sees which request.

                 requester          operator    auditor
    file         yes                yes         no
    see          what it filed      all         all
    find, verify no                 yes         yes
    work, refuse, withdraw,
    read reasons, export  no        yes         no

A token for one model sees and touches only that model: requests that ask it, its answers, its
releases. It ends only requests that ask this model alone. What a token may not see is not there for
it: the answer is the same 404 as for a number that was never given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date, timedelta
from typing import Any, Literal, cast, get_args

from sqlalchemy import Connection, Select, case, func, insert, select

from expunge.errors import InputError
from expunge.ledger.chain import Event, append, list_own
from expunge.ledger.clocks import SOON, Pace, read_now
from expunge.ledger.database import reading, writing
from expunge.ledger.ledger import Ledger
from expunge.ledger.models import Model
from expunge.ledger.names import read_person
from expunge.ledger.requests import STATES, Request, State, file_request, list_requests
from expunge.ledger.schema import FILINGS, MODELS, RELEASES, REQUESTS, WORK
from expunge.ledger.tokens import Role, Token
from expunge.server.refusals import RefusedError

Act = Literal["file", "find", "models", "verify", "work", "end", "reason", "export"]
MAY: dict[Role, frozenset[Act]] = {
    "requester": frozenset[Act](("file",)),
    "operator": frozenset[Act](get_args(Act)),
    "auditor": frozenset[Act](("find", "models", "verify")),
}
PACES: tuple[Pace, ...] = get_args(Pace)
Kind = State | Literal["waiting"]
KINDS: tuple[Kind, ...] = ("waiting", *STATES)


@dataclass(frozen=True)
class Choice:
    """Which requests to list; "waiting" are those that are not answered: open or running."""

    state: Kind | None = None
    pace: Pace | None = None
    model: str | None = None
    page: int = 1
    most: int = 25


@dataclass(frozen=True)
class Listed:
    """One page of requests, how many fit in all, and how many wait at which pace."""

    requests: tuple[Request, ...]
    total: int
    waiting: dict[Pace, int]


def allow(token: Token, act: Act, model: str | None = None) -> None:
    """Refuse what a role may not do, and every model but a token's own."""
    if act not in MAY[token.role]:
        raise RefusedError(403, f"a token of the role {token.role} may not do this")
    if model is not None and token.model not in (None, model):
        raise RefusedError(404, "there is no such model")


def file_for(
    ledger: Ledger,
    token: Token,
    person: str,
    *,
    model: str | None = None,
    received: date | None = None,
    due: date | None = None,
    reason: str | None = None,
) -> Request:
    """File a request, and note which token did: both, or neither.

    Whoever files what was filed before sees the request that is there.
    """
    allow(token, "file")
    try:
        read_person(person)
    except InputError:
        raise RefusedError(
            422, "person must be an identifier of 1 to 1,024 characters that can be seen"
        ) from None
    if token.model is not None and model not in (None, token.model):
        raise RefusedError(403, f"this token is for the model {token.model} alone")
    asked = model or token.model
    live = {one.name for one in ledger.models() if one.retired is None}
    if asked is not None and asked not in live:
        raise RefusedError(422, "model must be the name of a registered model, not a retired one")
    with writing(ledger.engine) as connection:
        number, new = file_request(
            connection, ledger.key, person, model=asked, received=received, due=due, reason=reason
        )
        mine = (FILINGS.c.token == token.name) & (FILINGS.c.request == number)
        if connection.execute(select(FILINGS).where(mine)).first() is None:
            connection.execute(insert(FILINGS).values(token=token.name, request=number))
            append(connection, "token", did="filed", name=token.name, request=number)
        (found,) = list_requests(connection, ledger.key, numbers=[number], new=new)
    return _narrow(found, token)


def find_request(ledger: Ledger, token: Token, number: int) -> Request:
    """One request, if this token may see it."""
    with reading(ledger.engine) as connection:
        chosen = _restrict(select(REQUESTS.c.number), token).where(REQUESTS.c.number == number)
        if connection.execute(chosen).first() is None:
            raise RefusedError(404, "there is no such request")
        (found,) = list_requests(connection, ledger.key, numbers=[number])
    return _narrow(found, token)


def find_person(ledger: Ledger, token: Token, person: str) -> tuple[Request, ...]:
    """All requests about a person that this token may see."""
    allow(token, "find")
    try:
        hashed = ledger.key.hash_person(person)
    except InputError:
        return ()
    with reading(ledger.engine) as connection:
        chosen = _restrict(select(REQUESTS.c.number), token).where(REQUESTS.c.person == hashed)
        return _list(connection, ledger, token, list(connection.execute(chosen).scalars()))


def choose(ledger: Ledger, token: Token, choice: Choice) -> Listed:
    """A page of requests: those that wait by due date, then those that ended, newest first."""
    today = read_now().date()
    base = _restrict(select(REQUESTS.c.number), token)
    if choice.model is not None:
        known = choice.model if token.model in (None, choice.model) else ""
        base = base.where(REQUESTS.c.number.in_(_asking(known)))
    chosen = base
    if choice.state == "waiting":
        chosen = chosen.where(REQUESTS.c.ended.is_(None))
    elif choice.state is not None:
        chosen = chosen.where(REQUESTS.c.state == choice.state)
    if choice.pace is not None:
        chosen = chosen.where(_find_pace(today) == choice.pace)
    ordered = chosen.order_by(
        REQUESTS.c.ended.is_not(None),
        case((REQUESTS.c.ended.is_(None), REQUESTS.c.due)),
        REQUESTS.c.number.desc(),
    )
    with reading(ledger.engine) as connection:
        total = connection.execute(select(func.count()).select_from(chosen.subquery())).scalar_one()
        page = ordered.offset((choice.page - 1) * choice.most).limit(choice.most)
        numbers = list(connection.execute(page).scalars())
        paces = base.where(REQUESTS.c.ended.is_(None)).with_only_columns(
            _find_pace(today).label("pace"), func.count()
        )
        counts = {row[0]: row[1] for row in connection.execute(paces.group_by("pace"))}
        found = _list(connection, ledger, token, numbers)
    return Listed(found, total, {pace: counts.get(pace, 0) for pace in PACES})


def list_visible_models(ledger: Ledger, token: Token) -> tuple[Model, ...]:
    """The models that a token is for."""
    return tuple(one for one in ledger.models() if token.model in (None, one.name))


def find_visible_model(ledger: Ledger, token: Token, name: str) -> Model:
    """One model, if this token may see it."""
    for one in list_visible_models(ledger, token):
        if one.name == name:
            return one
    raise RefusedError(404, "there is no such model")


def list_visible_events(ledger: Ledger, token: Token, number: int) -> tuple[Event, ...]:
    """What happened to a request; bodies, which name other requests, only for who sees all."""
    find_request(ledger, token, number)
    with reading(ledger.engine) as connection:
        found = list_own(connection, number)
    if token.role != "requester" and token.model is None:
        return found
    models = (None, token.model)
    kept = [one for one in found if token.model is None or one.body.get("model") in models]
    return tuple(
        replace(one, body={"model": one.body["model"]} if one.body.get("model") else {})
        for one in kept
    )


def _restrict(chosen: Select[Any], token: Token) -> Select[Any]:
    if token.role == "requester":
        mine = select(FILINGS.c.request).where(FILINGS.c.token == token.name)
        chosen = chosen.where(REQUESTS.c.number.in_(mine))
    if token.model is not None:
        chosen = chosen.where(REQUESTS.c.number.in_(_asking(token.model)))
    return chosen


def _asking(model: str) -> Select[Any]:
    asked = select(WORK.c.request).join(MODELS, MODELS.c.id == WORK.c.model)
    return asked.where(MODELS.c.name == model)


def _find_pace(today: date) -> Any:
    """The pace of :func:`expunge.ledger.clocks.read_clock`, in SQL."""
    soon = (today + timedelta(days=SOON)).isoformat()
    until = func.coalesce(func.substr(REQUESTS.c.ended, 1, 10), today.isoformat())
    waits = REQUESTS.c.ended.is_(None)
    late, near = cast(Pace, "overdue"), cast(Pace, "due soon")
    return case(
        (REQUESTS.c.due < until, late), (waits & (REQUESTS.c.due <= soon), near), else_="on time"
    )


def _list(
    connection: Connection, ledger: Ledger, token: Token, numbers: list[int]
) -> tuple[Request, ...]:
    """Requests in the order of ``numbers``."""
    found = {
        one.number: _narrow(one, token)
        for start in range(0, len(numbers), 500)
        for one in list_requests(connection, ledger.key, numbers=numbers[start : start + 500])
    }
    return tuple(found[number] for number in numbers)


def _narrow(found: Request, token: Token) -> Request:
    """A request as a token sees it: of a token for one model, only that model's answer."""
    if token.model is None:
        return found
    return replace(found, answers=tuple(a for a in found.answers if a.model == token.model))


def list_answering(ledger: Ledger, token: Token) -> set[tuple[str, int]]:
    """(model, release) of every release that answers a request which a token sees."""
    chosen: Any = (
        select(MODELS.c.name, RELEASES.c.number)
        .join(WORK, WORK.c.model == MODELS.c.id)
        .join(RELEASES, RELEASES.c.id == WORK.c.release)
        .join(REQUESTS, REQUESTS.c.number == WORK.c.request)
    )
    with reading(ledger.engine) as connection:
        rows: Any = connection.execute(_restrict(chosen, token))
        return {(name, number) for name, number in rows}
