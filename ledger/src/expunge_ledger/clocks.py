"""When an answer is due, and how late it is: computed from two dates and today, never stored."""

from __future__ import annotations

import calendar
import re
from contextlib import suppress
from datetime import UTC, date, datetime
from typing import Literal

from expunge import InputError

SOON = 7
Pace = Literal["on time", "due soon", "overdue"]


def read_pace(due: date, ended: date | None, today: date) -> tuple[Pace, int]:
    """The pace, and the days that are left (or were, when it ended), negative when overdue.

    >>> read_pace(date(2026, 2, 28), None, date(2026, 2, 25))
    ('due soon', 3)
    """
    days = (due - (ended or today)).days
    if days < 0:
        return "overdue", days
    return ("due soon" if ended is None and days <= SOON else "on time"), days


def add_month(day: date) -> date:
    """The same day of the next month, or its last: one month as the law counts it.

    >>> add_month(date(2026, 1, 31)), add_month(date(2026, 12, 5))
    (datetime.date(2026, 2, 28), datetime.date(2027, 1, 5))
    """
    year, month = day.year + day.month // 12, day.month % 12 + 1
    return date(year, month, min(day.day, calendar.monthrange(year, month)[1]))


def read_date(field: str, given: date | str | None, default: date) -> date:
    """A date from a date or its ISO text."""
    if given is None or isinstance(given, date):
        return default if given is None else date(given.year, given.month, given.day)
    with suppress(ValueError):
        if re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", given):
            return date.fromisoformat(given)
    raise InputError.of(field, given, "a date such as 2026-01-31")


def read_now() -> datetime:
    """Now, in whole seconds of UTC."""
    return datetime.now(UTC).replace(microsecond=0)
