"""README.md as a package index shows it: links that only a checkout can follow become their texts.

hatchling calls it when it builds the metadata. With a `Source` among [project.urls] they point there instead.
"""

import re
from pathlib import Path
from typing import Any

try:
    from hatchling.metadata.plugin.interface import MetadataHookInterface
except ImportError:
    MetadataHookInterface = object  # type: ignore[assignment,misc]

LINK = re.compile(r"\[((?:[^\]\[]|\n)+)\]\((?!https?:|#)([^)]+)\)")


def readable(text: str, source: str = "") -> str:
    """Relative links as links into `source`, or as their texts; links to sections of the page itself stay."""
    return LINK.sub(rf"[\1]({source}/\2)" if source else r"\1", text)


class Hook(MetadataHookInterface):
    """The `readme` of the project, which pyproject.toml declares dynamic."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme`."""
        source = metadata.get("urls", {}).get("Source", "")
        text = readable((Path(self.root) / "README.md").read_text(encoding="utf-8"), source.rstrip("/"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def get_metadata_hook() -> type[Hook]:
    """hatchling's entry: the package has another hook in scope."""
    return Hook
