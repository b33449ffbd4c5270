"""What API and pages share: the ledger, its worker, who is asking, and how often they may."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

from expunge.errors import InputError, VerificationError
from expunge.ledger.ledger import Ledger
from expunge.ledger.models import Model
from expunge.ledger.requests import Request
from expunge.ledger.tokens import Token, find_token, hash_token
from expunge.server.access import (
    MAY,
    allow,
    find_request,
    find_visible_model,
    list_answering,
    list_visible_models,
)
from expunge.server.desk import Desk, Progress
from expunge.server.limits import Buckets, Limits
from expunge.server.refusals import RefusedError
from expunge.server.releases import File, find_release, inspect_release, make_file
from expunge.server.schemas import VerifiedShown
from expunge.server.sessions import Sessions

MOST_TOKEN = 200


@dataclass
class Service:
    """One server on one ledger."""

    ledger: Ledger
    desk: Desk
    limits: Limits
    sessions: Sessions = field(default_factory=Sessions)
    rates: Buckets = field(init=False)
    failures: Buckets = field(init=False)
    _verifying: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.rates = Buckets(self.limits.token)
        self.failures = Buckets(self.limits.failures)

    def identify(self, secret: str, address: str) -> Token:
        """The token that was sent. Wrong ones are counted by address; a right one always passes,
        so that nobody can lock others out behind the same proxy."""
        hashed = hash_token(secret[:MOST_TOKEN])
        token = find_token(self.ledger.engine, hashed) if len(secret) <= MOST_TOKEN else None
        if token is None:
            if wait := self.failures.take(address):
                raise RefusedError(429, "too many tokens that are not known", wait)
            raise RefusedError(401, "the token is not known here")
        return self.admit(token)

    def admit(self, token: Token) -> Token:
        """The same token, if it did not ask too often."""
        if wait := self.rates.take(token.name):
            raise RefusedError(429, "too many requests with this token", wait)
        return token

    def end(self, token: Token, number: int, how: str, reason: str) -> Request:
        """Withdraw or refuse a request."""
        allow(token, "end")
        found = find_request(self.ledger, token, number)
        if token.model is not None and found.model != token.model:
            raise RefusedError(403, "this request asks other models too")
        if len(reason) > 2_000:
            raise RefusedError(422, "reason: at most 2,000 characters")
        if how == "refused" and not reason.strip():
            raise RefusedError(422, "reason: say why the request is refused")
        if how == "withdrawn":
            self.ledger.withdraw(number, reason)
        else:
            self.ledger.refuse(number, reason)
        return find_request(self.ledger, token, number)

    def work(self, token: Token, model: str) -> Progress:
        """Have a model worked on in the background."""
        allow(token, "work", model)
        found = find_visible_model(self.ledger, token, model)
        if found.retired is not None:
            raise RefusedError(409, "this model is retired: no request asks it")
        return self.desk.ask(found.name)

    def show_progress(self, token: Token) -> list[Progress]:
        """The work on the models that a token sees."""
        found = self.desk.show()
        names = [one.name for one in list_visible_models(self.ledger, token)]
        shown = [found[name] for name in names if name in found]
        return shown if "work" in MAY[token.role] else [replace(one, said="") for one in shown]

    def download(self, token: Token, model: str, number: int, name: File) -> bytes:
        """A file of a release; a requester gets those that answer its own requests."""
        found = find_visible_model(self.ledger, token, model)
        release = find_release(found, number)
        if token.role == "requester" and not self._answers_own(token, found, number):
            raise RefusedError(404, "there is no such release")
        return make_file(release, name)

    def _answers_own(self, token: Token, model: Model, number: int) -> bool:
        return (model.name, number) in list_answering(self.ledger, token)

    def verify_release(self, token: Token, model: str, number: int) -> VerifiedShown:
        """Certificate, record, weights, people and parent of one release."""
        allow(token, "verify", model)
        found = find_visible_model(self.ledger, token, model)
        release = find_release(found, number)
        with self._one_at_a_time():
            differences = inspect_release(self.ledger, found, release)
        return VerifiedShown(holds=not differences, differences=differences, releases=1)

    def verify_model(self, token: Token, model: str) -> VerifiedShown:
        """All releases of a model, as a chain."""
        allow(token, "verify", model)
        found = find_visible_model(self.ledger, token, model)
        differences = list[str]()
        with self._one_at_a_time():
            for release in found.releases:
                said = inspect_release(self.ledger, found, release)
                differences += [f"release {release.number}: {one}" for one in said]
        count = len(found.releases)
        return VerifiedShown(holds=not differences, differences=differences, releases=count)

    def verify_request(self, token: Token, number: int) -> VerifiedShown:
        """Every release that answers a request, and the chain of events for who sees all of it."""
        allow(token, "verify")
        differences, count = list[str](), 0
        for answer in find_request(self.ledger, token, number).answers:
            if answer.release is not None:
                found = self.verify_release(token, answer.model, answer.release)
                differences += [f"{answer.model}: {one}" for one in found.differences]
                count += 1
        whole = VerifiedShown(holds=True, differences=[], releases=0)
        if token.model is None:
            whole = self.verify_ledger(token, certificates=False)
            differences += whole.differences
        told = {"holds": not differences, "differences": differences, "releases": count}
        return whole.model_copy(update=told)

    def verify_ledger(self, token: Token, *, certificates: bool = True) -> VerifiedShown:
        """The chain of events, the tables by the chain, and all certificates."""
        allow(token, "verify")
        if token.model is not None:
            raise RefusedError(403, f"this token is for the model {token.model} alone")
        with self._one_at_a_time():
            try:
                found = self.ledger.verify(certificates=certificates)
            except VerificationError as error:
                return VerifiedShown(holds=False, differences=[str(error)], releases=0)
        return VerifiedShown(
            holds=True, differences=[], events=found.events, head=found.head,
            releases=found.releases if certificates else 0,
        )  # fmt: skip

    def read_reason(self, token: Token, number: int) -> str | None:
        """What was sent with a request; free text, which may name somebody."""
        allow(token, "reason")
        return find_request(self.ledger, token, number).reason

    def export(self, token: Token, person: str) -> bytes:
        """The evidence about a person."""
        allow(token, "export")
        if token.model is not None:
            raise RefusedError(403, f"this token is for the model {token.model} alone")
        try:
            return self.ledger.export(person)
        except InputError:
            raise RefusedError(404, "nobody of this identifier has a request here") from None

    def _one_at_a_time(self) -> _Held:
        return _Held(self._verifying)


class _Held:
    """A lock that is refused, not waited for without end."""

    def __init__(self, lock: threading.Lock) -> None:
        self.lock = lock

    def __enter__(self) -> None:
        if not self.lock.acquire(timeout=2):
            raise RefusedError(503, "another verification is running; try again later", 10)

    def __exit__(self, *_: object) -> None:
        self.lock.release()
