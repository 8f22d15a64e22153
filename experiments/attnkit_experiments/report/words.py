"""A report's page in Markdown, word for word: what a repository keeps of it, and the site shows with its figures."""

from __future__ import annotations

import re
from html.parser import HTMLParser

FIGURE = re.compile(r"^\*Figure: (.*)\.\*$", re.MULTILINE)
"""The line that stands in the place of a figure, with its description; the site has the figure there."""

INLINE = {"b": "**", "code": "`"}
KEPT = ("small", "sub", "sup")
MARKUP = re.compile(r"([\\*$<|`]|(?<![^\W_])_|_(?![^\W_]))")


def as_markdown(page: str) -> str:
    """The body of a page of `report.html`, or a part of it, as Markdown; figures are lines with their descriptions."""
    reader = Reader()
    reader.feed(page[max(page.find("<main>"), 0) :])
    return "\n\n".join(block for block in reader.blocks if block.strip()) + "\n"


class Reader(HTMLParser):
    """Blocks of Markdown from the few elements that a report has."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[str] = []
        self.text = ""
        self.rows: list[list[str]] = []
        self.term = ""
        self.figure = 0  # depth inside an <svg>
        self.literal = self.alert = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        has = dict(attrs)
        if tag == "svg" and not self.figure:
            description = has.get("aria-label") or ""
            self.blocks.append(f"*Figure: {description}.*")
        self.figure += tag == "svg"
        if self.figure:
            return
        if tag in ("h1", "h2", "p", "li", "dt", "dd", "td", "th", "pre", "div"):
            self._flush()
        if tag == "table":
            self.rows = []
        elif tag == "tr":
            self.rows.append([])
        elif tag == "br":
            self.text += "<br>"
        elif tag in INLINE and not self.literal:
            self.text += INLINE[tag]
        elif tag in KEPT:
            self.text += f"<{tag}>"
        self.literal |= tag in ("code", "pre")
        self.alert |= tag == "div" and has.get("class") == "alert"

    def handle_endtag(self, tag: str) -> None:
        if self.figure:
            self.figure -= tag == "svg"
            return
        self.literal &= tag not in ("code", "pre")
        if tag in ("h1", "h2"):
            self._flush("## ")
        elif tag in ("p", "div"):
            self._flush("> " if self.alert else "")
            self.alert &= tag != "div"
        elif tag == "li":
            self._item(self.text)
        elif tag == "dt":
            self.term, self.text = self.text, ""
        elif tag == "dd":
            self._item(f"**{self.term}** {self.text}")
        elif tag in ("td", "th"):
            self.rows[-1].append(self.text.strip())
            self.text = ""
        elif tag == "table":
            self._table()
        elif tag == "pre":
            self.blocks.append(f"```text\n{self.text.strip().strip('`')}\n```")
            self.text = ""
        elif tag in INLINE:
            self.text += INLINE[tag]
        elif tag in KEPT:
            self.text += f"</{tag}>"

    def handle_data(self, data: str) -> None:
        if not self.figure:
            self.text += data if self.literal else escape(data)

    def _flush(self, before: str = "") -> None:
        if self.text.strip():
            self.blocks.append(before + self.text.strip())
        self.text = ""

    def _item(self, text: str) -> None:
        """A line of a list; lines of one list are one block."""
        if self.blocks and self.blocks[-1].startswith("- "):
            self.blocks[-1] += f"\n- {text.strip()}"
        else:
            self.blocks.append(f"- {text.strip()}")
        self.text = ""

    def _table(self) -> None:
        head, *rows = self.rows
        lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
        self.blocks.append("\n".join("| " + " | ".join(cells) + " |" for cells in lines))


def escape(text: str) -> str:
    """Text in which nothing is markup."""
    return MARKUP.sub(r"\\\1", re.sub(r"\s+", " ", text))
