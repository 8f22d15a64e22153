"""How long the first result takes to whom, from wheels that are there: `make ways-in`.

    python -m tests.repository.ways_in [torch] [kernels] [models] [student]     all by default

`torch`: attnkit beside torch, and five lines that swap the attention of a ViT block. `kernels`: the kit alone judges
somebody's function. `models`: the examples for transformers, flax and timm of docs/integrations.md. `student`: NumPy
alone, an op, its weights and gradients, and one verdict, from the tutorial. Each has an environment of its own that
sees the libraries of this one: what it would take to download them is not counted. Printed are seconds, and seconds of
CPU, which other work on the machine moves less. Exit status 1 if a way fails or takes more than a minute of CPU.
"""

import re
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.repository.projects import FOLDERS, ROOT, build

ATTNKIT, KIT = "attnkit", "attnkit-conformance"
LIMIT = 60
FIVE_LINES = """
import torch
from attnkit.integrations.torch import swap
vit = torch.nn.Sequential(torch.nn.TransformerEncoderLayer(384, 6, 1536, batch_first=True, norm_first=True)).eval()
swap(vit, "relu")
print(vit(torch.randn(1, 196, 384)).shape)
"""


def examples(page: str, *sections: str) -> list[list[str]]:
    """The examples under these headings of a page, each section a program, as arguments of Python."""
    text = (ROOT / "docs" / page).read_text()
    found = []
    for section in sections:
        part = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
        found.append(["-c", "\n".join(re.findall(r"```python\n(.*?)```", part, flags=re.DOTALL))])
    return found


JUDGED = ["-m", "attnkit_conformance", "run", "mine:ADAPTER", "--profile", "small", "-k", "plain"]
WAYS: dict[str, tuple[list[str], Callable[[], list[list[str]]]]] = {
    "torch": ([ATTNKIT], lambda: [["-c", FIVE_LINES]]),
    "kernels": ([KIT], lambda: [JUDGED]),
    "models": ([ATTNKIT], lambda: examples("integrations.md", "transformers", "flax", "timm")),
    "student": ([ATTNKIT, KIT], lambda: examples("tutorial.md", "2. Call an op", "4. Judge it")),
}
"""What is installed, and what runs then, one program after the other."""


def timed(command: list[str], folder: Path) -> tuple[float, float]:
    """Seconds that a command takes, and seconds of CPU. RuntimeError where it fails."""
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, env={"PATH": "/usr/bin"}, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)[:200]}\n{(done.stdout + done.stderr)[-2000:]}")
    return time.monotonic() - start, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def walk(way: str, wheels: dict[str, Path], folder: Path) -> float:
    """Go one way, print how long its steps take; the answer is seconds of CPU."""
    needs, programs = WAYS[way]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    site = next(folder.glob("venv/lib/python*/site-packages"))
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    (folder / "mine.py").write_text((ROOT / "docs" / "examples" / "ci" / "mine.py").read_text())
    python = str(folder / "venv" / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "--no-index"]
    installed = timed([*pip, "--no-deps", *(str(wheels[name]) for name in needs)], folder)
    ran = [timed([python, *program], folder) for program in programs()]
    wall, cpu = (installed[n] + sum(times[n] for times in ran) for n in (0, 1))
    sizes = ", ".join(f"{name} {wheels[name].stat().st_size / 1e6:.2f} MB" for name in needs)
    first = f"pip install {installed[1]:.1f} s of CPU ({sizes}), first result {cpu - installed[1]:.1f}"
    print(f"{way}: {first}; in all {cpu:.1f} of CPU, {wall:.1f} s", flush=True)
    return cpu


def main(asked: list[str]) -> int:
    """Go the ways that are named, or all."""
    if unknown := [way for way in asked if way not in WAYS]:
        print(f"error: expected some of {', '.join(WAYS)}; got {', '.join(unknown)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as place:
        # without compiled kernels, whose making is not what is timed
        wheels = {name: build(folder, Path(place) / name, level="portable") for name, folder in FOLDERS.items()}
        slow = []
        for way in asked or WAYS:
            (folder := Path(place) / way).mkdir()
            if walk(way, wheels, folder) > LIMIT:
                slow.append(way)
    if slow:
        print(f"more than {LIMIT} s of CPU: {', '.join(slow)}", file=sys.stderr)
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
