"""Browsers that signed in: a random cookie each, known here by its hash, and tokens for forms.

    form token = HMAC(secret of this process, cookie)

A session knows the hash of a token, not what it may do: that is looked up each time, so a token
that is revoked ends its sessions at once. A restart ends all of them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

IDLE, LONGEST, MOST = 1_800.0, 28_800.0, 1_000


@dataclass(frozen=True)
class Session:
    """Who signed in, when, and when last seen."""

    token: str
    begun: float
    seen: float


@dataclass
class Sessions:
    """All sessions of this process.

    >>> now = [0.0]
    >>> sessions = Sessions(clock=lambda: now[0])
    >>> cookie = sessions.begin("hash of a token")
    >>> sessions.find(cookie), sessions.find("another")
    ('hash of a token', None)
    >>> now[0] = IDLE + 1
    >>> sessions.find(cookie) is None
    True
    """

    clock: Callable[[], float] = time.monotonic
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    _known: dict[str, Session] = field(default_factory=dict[str, Session], repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, token: str) -> str:
        """A new session; its cookie."""
        cookie, now = secrets.token_urlsafe(32), self.clock()
        with self._lock:
            if len(self._known) >= MOST:
                self._known.pop(min(self._known, key=lambda key: self._known[key].seen))
            self._known[_hash(cookie)] = Session(token, now, now)
        return cookie

    def find(self, cookie: str) -> str | None:
        """The hash of the token that a cookie stands for."""
        now, key = self.clock(), _hash(cookie)
        with self._lock:
            found = self._known.get(key)
            if found is None:
                return None
            if now - found.seen > IDLE or now - found.begun > LONGEST:
                del self._known[key]
                return None
            self._known[key] = replace(found, seen=now)
            return found.token

    def end(self, cookie: str) -> None:
        """Sign out."""
        with self._lock:
            self._known.pop(_hash(cookie), None)

    def make_form_token(self, cookie: str) -> str:
        """What every form of a page that was sent for this cookie carries."""
        return hmac.new(self._secret, cookie.encode("utf-8"), hashlib.sha256).hexdigest()

    def fits(self, cookie: str, given: str) -> bool:
        """Whether a form was sent by a page of ours, for this cookie."""
        made = self.make_form_token(cookie)
        return hmac.compare_digest(made.encode(), given.encode("utf-8", "replace"))


def _hash(cookie: str) -> str:
    return hashlib.sha256(cookie.encode("utf-8", "replace")).hexdigest()
