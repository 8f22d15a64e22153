"""README.md as a package index shows it: links that only a checkout can follow become their texts, and pictures with
their captions are left out.

hatchling calls it when it builds the metadata. Where pyproject.toml names the repository they point there instead, and
so do the package's own links.
"""

import re
from pathlib import Path
from typing import Any

try:
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ImportError:
    MetadataHookInterface = object  # type: ignore[assignment,misc]

FILES = "/blob/main"
"""Behind the address of a repository, where its files are shown."""
PICTURES = "/raw/main"
"""Behind it, where a file is sent as what it is."""
IMAGE = re.compile(r"!\[([^\]]*)\]\((?!https?:)([^)]+)\)(\n\n\*[^*]+\*\n*)?")
LINK = re.compile(r"\[((?:[^\]\[]|\n)+)\]\((?!https?:|#)([^)]+)\)")


def readable(text: str, repository: str = "") -> str:
    """Relative links as links into the repository, or as their texts; links to sections of the page itself stay."""
    text = IMAGE.sub(rf"![\1]({repository}{PICTURES}/\2)\3" if repository else "", text)
    return LINK.sub(rf"[\1]({repository}{FILES}/\2)" if repository else r"\1", text)


def links(repository: str) -> dict[str, str]:
    """The `urls` of a project by the address of its repository, "" where it has none."""
    if not repository:
        return {}
    pages = {"Source": "", "Issues": "/issues", "Documentation": f"{FILES}/docs", "Changelog": f"{FILES}/CHANGELOG.md"}
    return {name: repository + path for name, path in pages.items()}


class Hook(MetadataHookInterface):
    """What pyproject.toml declares dynamic: `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set both."""
        repository = self.config["repository"].rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": readable(text, repository)}
        metadata["urls"] = links(repository)


def get_metadata_hook() -> type[Hook]:
    """hatchling's entry: the package has another hook in scope."""
    return Hook
