"""Puts the reference into the kit's distributions: from beside the kit in a checkout, from within it in a source
distribution.
"""

from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

REFERENCE = "attnkit_reference"


class Hook(BuildHookInterface):
    """hatchling's entry."""

    def initialize(self, version: str, build_data: dict[str, object]) -> None:
        """Name the reference's folder; an editable installation finds it by its path."""
        if version == "editable":
            return
        places = (Path(self.root).parent / "reference" / REFERENCE, Path(self.root) / REFERENCE)
        build_data["force_include"][str(next(place for place in places if place.is_dir()))] = REFERENCE
