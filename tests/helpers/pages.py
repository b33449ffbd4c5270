"""Metrics to show, and a reader that says everything that is wrong with a page."""

import re
from collections import Counter
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "br", "hr", "img", "link", "input", "base", "source", "wbr", "col", "area", "embed"}
FORBIDDEN = {"script", "iframe", "object", "embed", "link", "base", "form", "img", "image", "use"}


METRICS: dict[str, Any] = {
    "title": "Shop model",
    "task": "returns, three classes",
    "stages": [
        {"stage": "before", "retain": 0.98, "forget": 0.9512, "test": 0.93},
        {"stage": "after noise", "retain": 0.31, "forget": 0.3234, "test": 0.305},
        {"stage": "after fine-tuning", "retain": 0.95, "forget": 0.8976, "test": 0.915},
        {"stage": "after fine-tuning", "arm": "centre", "retain": 0.94, "forget": 0.8865},
    ],
    "curves": [
        {"name": "run", "x": [0, 1, 2], "y": [0.1, None, 0.7], "x_label": "epoch", "y_label": "a"},
        {"name": "centre", "x": [0, 1], "y": [0.2, 0.6], "x_label": "epoch", "y_label": "a"},
        {"name": "loss", "x": [0, 1], "y": [2.5, 0.5], "x_label": "epoch", "y_label": "loss"},
    ],
    "arms": [
        {"arm": "gradient-clipping", "epsilon": 1.2, "delta": 1e-5, "gradient_evaluations": 10880,
         "retain": 0.95, "forget": 0.8976, "test": 0.915},
        {"arm": "retraining", "epsilon": 0, "delta": 0, "gradient_evaluations": 43520,
         "test": 0.925},
        {"arm": "centre", "gradient_evaluations": 10880, "test": 0.914},
    ],
    "cost": {"seconds": 3.25, "retraining_seconds": 41.5},
}  # fmt: skip
AUDIT = {
    "epsilon_lower": 0.61, "epsilon_certified": 1.2, "confidence": 0.999,
    "attack": {"name": "worst pair", "trials": 100000, "roc": list(range(50))},
}  # fmt: skip


class Page(HTMLParser):
    """The elements, texts and problems of one page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.problems: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.headings: list[int] = []
        self.captions: list[str] = []
        self.texts: list[str] = []
        self.codes: dict[str, str] = {}
        self._code: str | None = None
        self.feed(text)
        self.close()
        self.problems += [f"<{tag}> is never closed" for tag in self.open]
        self._check(text)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID and not (self.get_starttag_text() or "").endswith("/>"):
            self.open.append(tag)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "th" and "scope" not in dict(attrs):
            self.problems.append("<th> without scope")
        if tag == "caption":
            self.captions.append("")
        if tag == "code" and dict(attrs).get("id"):
            self._code = dict(attrs)["id"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> closes nothing")
        if tag == "code":
            self._code = None

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            return
        self.texts.append(data)
        if "caption" in self.open:
            self.captions[-1] += data
        if self._code is not None:
            self.codes[self._code] = self.codes.get(self._code, "") + data

    def values(self, name: str) -> list[str]:
        return [value for _, given, value in self.attributes if given == name]

    def _check(self, text: str) -> None:
        ids = Counter(self.values("id"))
        self.problems += [f"id {name!r} is used twice" for name, n in ids.items() if n > 1]
        self.problems += [f"<{tag}> is there" for tag in FORBIDDEN if self.tags[tag]]
        for _, name, value in self.attributes:
            if name.startswith("on") or name in ("src", "srcset", "style", "action", "data"):
                self.problems.append(f"attribute {name}={value!r}")
            if name.endswith("href") and (value[:1] != "#" or value[1:] not in ids):
                self.problems.append(f"link to {value!r}")
            if name == "aria-labelledby":
                self.problems += [f"no id {part!r}" for part in value.split() if part not in ids]
        if re.search(r"https?:|url\(|@import|javascript:", text):
            self.problems.append("something could be fetched")
        if len(self.captions) != self.tags["table"] or not all(map(str.strip, self.captions)):
            self.problems.append("a table has no caption")
        steps = zip([0, *self.headings], self.headings, strict=False)
        self.problems += [f"h{a} is followed by h{b}" for a, b in steps if b > a + 1]
        if self.headings.count(1) != 1:
            self.problems.append("there must be one h1")
        drawings = self.tags["svg"]
        if Counter(self.values("role"))["img"] != drawings or self.tags["desc"] != drawings:
            self.problems.append("a drawing has no text alternative")
        self._check_head()

    def _check_head(self) -> None:
        given: dict[str, Any] = {
            (tag, name): value for tag, name, value in self.attributes if tag in ("html", "meta")
        }
        policy = [value for value in self.values("content") if "default-src 'none'" in value]
        if not policy or "script-src" in policy[0]:
            self.problems.append("the content security policy is missing or too wide")
        if given.get(("html", "lang")) != "en" or "viewport" not in self.values("name"):
            self.problems.append("lang or viewport is missing")
