"""Reports as text that is the same on every machine: hashes in the place of measured numbers, figures in words."""

import html
import json
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import collections, image, legend, lines, patches, spines, text
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

CHOSEN = {"alpha"}  # numbers of a result that were not measured
COUNTED = {"bytes"}  # those that were, and are whole
MACHINE = ("python", "torch", "numpy", "attnkit", "native", "commit", "device", "system")
FEW = 12  # points of a curve that are written out
CURVES = 4  # records of training losses that are written out


def settle(folder: Path) -> Path:
    """Replace what a study has measured by numbers of three digits that depend on their place alone."""
    for path in (*folder.glob("cells/*/*.json*"), *folder.glob("*.json")):
        name = str(path.relative_to(folder))
        if path.name == "study.json":
            path.write_text(json.dumps(_of_any_machine(json.loads(path.read_text()))))
        elif path.suffix == ".jsonl":
            rows = map(json.loads, path.read_text().splitlines())
            path.write_text("".join(json.dumps(_settled(row, f"{name}/{n}")) + "\n" for n, row in enumerate(rows)))
        else:
            path.write_text(json.dumps(_settled(json.loads(path.read_text()), name)))
    for path in folder.glob("cells/*/maps.safetensors"):
        _settle_maps(path, str(path.relative_to(folder)))
    for path in folder.glob("cells/*/outcomes.safetensors"):
        _settle_outcomes(path)
    for path in folder.glob("cells/*/references.txt"):
        path.unlink()  # translations of untrained models differ from machine to machine
    return folder


def _settle_outcomes(path: Path) -> None:
    """Samples around the settled score of their cell; BLEU, which is no mean, is left out."""
    result = json.loads((path.parent / "result.json").read_text())
    with safe_open(path, "numpy") as stored:
        metadata, outcomes = stored.metadata(), {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    settled = {}
    for name, each in outcomes.items():
        if name not in result or each.shape[1:] == (10,):
            continue
        swing = np.sin(np.arange(len(each)) * (1 + zlib.crc32(path.parent.name.encode()) % 7))
        counts = each[:, 1] if each.ndim == 2 else np.ones(len(each))
        sums = counts * result[name] + 0.1 * (swing - swing.mean())
        settled[name] = np.stack([sums, counts], 1) if each.ndim == 2 else sums
    path.unlink()
    if settled:
        save_file(settled, path, metadata)


def _of_any_machine(about: dict[str, Any]) -> dict[str, Any]:
    environment = about["environment"] | {key: key for key in MACHINE} | {"cores": 4}
    data = {"data": about["data"] | {"checksum": "checksum"}} if "data" in about else {}
    return about | {"environment": environment} | data


def _settled(value: Any, place: str) -> Any:
    if isinstance(value, dict):
        return {key: x if key in CHOSEN else _settled(x, f"{place}/{key}") for key, x in value.items()}
    if isinstance(value, list):
        return [_settled(x, f"{place}/{n}") for n, x in enumerate(value)]
    if isinstance(value, str):
        return "implementation" if "/implementations/" in place else re.sub(r"version:[\d.]+", "version:any", value)
    if isinstance(value, float) or (place.rpartition("/")[2] in COUNTED and value is not None):
        thousandths = 100 + zlib.crc32(place.encode()) % 900
        return float(thousandths) if "seconds" in place or "ms" in place else thousandths / 1000
    return value


def _settle_maps(path: Path, name: str) -> None:
    with safe_open(path, framework="np") as stored:
        metadata = stored.metadata()
    arrays = load_file(path)
    for key, array in arrays.items():
        if array.dtype.kind == "f":
            rng = np.random.default_rng(zlib.crc32(f"{name}/{key}".encode()))
            arrays[key] = rng.integers(-300, 1000, array.shape).astype(array.dtype) / 1000
    save_file(arrays, path, metadata)


def as_text(folder: Path) -> str:
    """The page, the summary and the tables of a report, a line per row."""
    page = re.sub(r"<style>.*?</style>", "", (folder / "report.html").read_text(), flags=re.DOTALL)
    parts = {
        "report.html": html.unescape(re.sub(r"(?=<(?:h\d|p|div|tr|li|dt|ul|svg|/table|/div|/main)\b)", "\n", page))
    }
    for path in (*folder.glob("*.md"), *sorted(folder.glob("*.csv"))):
        rows = path.read_text().partition("\n## ")[0].splitlines()  # what follows are the words of the page
        written = "\n".join(rows[: CURVES if path.name in ("curves.csv", "losses.csv", "norms.csv") else None])
        parts[path.name] = re.sub(r"\d+\.\d{6,}", lambda number: f"{float(number[0]):.6g}", written)
    return re.sub(r"\n\s*\n+", "\n", "".join(f"==== {name}\n{part}\n" for name, part in parts.items()))


def words(page: str) -> list[str]:
    """The words of a page of HTML."""
    return html.unescape(re.sub(r"<[^>]*>", " ", page)).split()


# ---------------------------------------------------------------------------------------------- figures


def draw_in_words(figure: Figure, file: Any, **how: Any) -> None:
    """In the place of Figure.savefig: an <svg> that holds the figure in words."""
    words = f"<svg>\n{html.escape(described(figure))}</svg>"
    if isinstance(file, str | Path):
        Path(file).write_text(words)
    else:
        file.write(words)


def described(figure: Figure) -> str:
    """A line for the figure, for each of its axes, and for everything that is drawn there."""
    figure.draw_without_rendering()
    rows = [f"figure of {_numbers(figure.get_size_inches())} inches"]
    for axes in figure.axes:
        rows += _axes(axes)
        children = [artist for artist in axes.get_children() if artist is not axes.patch]
        rows += [f"  {words}" for artist in children if (words := _words(artist))]
    return "".join(f"{row}\n" for row in rows)


def _axes(axes: Axes) -> list[str]:
    place = f"axes at {_numbers(axes.get_position().bounds)}"
    if not axes.axison:
        return [f"{place}, off"]
    sides = [side for side, spine in axes.spines.items() if spine.get_visible()]
    return [
        f"{place}, edges {' '.join(sides) or 'none'}",
        *(f"  {name} {_axis(axis)}" for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)) if _axis(axis)),
    ]


def _axis(axis: Axis) -> str:
    ticks = [tick for tick in axis.get_majorticklabels() if tick.get_visible() and tick.get_text()]
    label, minor = axis.get_label_text(), len(axis.get_minorticklocs())
    if not (ticks or label):
        return ""
    grid = any(line.get_visible() for line in axis.get_gridlines())
    style = f", {ticks[0].get_fontsize():g} points, {ticks[0].get_rotation():g}°" if ticks else ""
    return (
        f"'{label}', {axis.get_scale()} from {_numbers(axis.get_view_interval())}, {minor} minor ticks"
        f"{', grid' if grid else ''}: {' | '.join(tick.get_text() for tick in ticks)}{style}"
    )


def _words(artist: Artist) -> str:
    if not artist.get_visible() or isinstance(artist, spines.Spine):
        return ""
    for kind, describe in KINDS.items():
        if isinstance(artist, kind):
            words = describe(artist)
            alpha = "" if artist.get_alpha() is None else f", alpha {artist.get_alpha():g}"
            return words and f"{words}{alpha}, z {artist.get_zorder():g}"
    return ""


def _text(artist: text.Text) -> str:
    if not artist.get_text():
        return ""
    place = _numbers(artist.get_position())
    if isinstance(artist, text.Annotation):
        place = f"{_numbers(artist.xyann)} from {_numbers(artist.xy)}"
    return (
        f"text {artist.get_text()!r} at {place}, {artist.get_ha()} {artist.get_va()}, {artist.get_fontsize():g} "
        f"points, {artist.get_rotation():g}°, {_colour(artist.get_color())}"
    )


def _line(artist: lines.Line2D) -> str:
    dashes = artist._unscaled_dash_pattern[1]
    line = "no line"
    if artist.get_linestyle() != "None":
        line = f"{artist.get_linewidth():g} wide" + (f", dashes {_numbers(dashes)}" if dashes else "")
    marks = ""
    if artist.get_marker() != "None":
        faces, edges = _colour(artist.get_markerfacecolor()), _colour(artist.get_markeredgecolor())
        size, width = artist.get_markersize(), artist.get_markeredgewidth()
        marks = f", marks {artist.get_marker()} of {size:g}, {faces}, edges {edges} of {width:g}"
    label = "" if str(artist.get_label()).startswith("_") else f" {artist.get_label()!r}"
    return f"line{label} {_points(artist.get_xydata())}, {_colour(artist.get_color())}, {line}{marks}"


def _image(artist: image.AxesImage) -> str:
    array = np.asarray(artist.get_array(), dtype=np.float64).round(4)
    return (
        f"image of {'x'.join(map(str, array.shape))}, {zlib.crc32(array.tobytes()):08x}, {artist.get_cmap().name} from "
        f"{_numbers(artist.get_clim())}, {artist.get_interpolation()}, in {_numbers(artist.get_extent())}"
    )


def _collection(artist: collections.Collection) -> str:
    corners = np.concatenate([path.vertices for path in artist.get_paths()])
    faces, edges = ("|".join(dict.fromkeys(map(_colour, c))) for c in (artist.get_facecolor(), artist.get_edgecolor()))
    widths = _numbers(np.unique(artist.get_linewidth()))
    return f"{type(artist).__name__} {_points(corners)}, {faces or 'none'}, edges {edges} of {widths}"


def _patch(artist: patches.Patch) -> str:
    corners = artist.get_patch_transform().transform(artist.get_path().vertices)
    faces, edges = _colour(artist.get_facecolor()), _colour(artist.get_edgecolor())
    return f"{type(artist).__name__} {_points(corners)}, {faces}, edges {edges} of {artist.get_linewidth():g}"


def _legend(artist: legend.Legend) -> str:
    assert artist.axes is not None
    box = artist.get_bbox_to_anchor().transformed(artist.axes.transAxes.inverted())
    names = [item.get_text() for item in artist.get_texts()]
    sizes = sorted({item.get_fontsize() for item in artist.get_texts()})
    return f"legend {artist._loc} at {_numbers(box.min)}, {_numbers(sizes)} points: {' | '.join(names)}"


KINDS: dict[type[Artist], Any] = {
    legend.Legend: _legend,
    text.Text: _text,
    lines.Line2D: _line,
    image.AxesImage: _image,
    collections.Collection: _collection,
    patches.Patch: _patch,
}


def _points(points: Any) -> str:
    points = np.asarray(points, dtype=np.float64)
    if len(points) > FEW:
        return f"{len(points)} points, {_points(points[np.linspace(0, len(points) - 1, FEW).astype(int)])}"
    return " ".join(f"({in_short(x)},{in_short(y)})" for x, y in points)


def _numbers(numbers: Iterable[float]) -> str:
    return ",".join(map(in_short, numbers))


def in_short(x: float) -> str:
    """Three digits, the same for a number and for what a CSV has of it, six."""
    return f"{float(f'{x:.6g}'):.3g}"


def _colour(colour: Any) -> str:
    return (
        "none" if isinstance(colour, str) and colour == "none" else to_hex(colour, keep_alpha=True).removesuffix("ff")
    )
