"""Programs of torch that are read from a file, where nothing of attnkit is called: it is imported."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import attnkit
from attnkit.integrations.torch import swap

pytestmark = [
    # torch: its exporter still uses names that torch has deprecated
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.skipif(attnkit.native_status().level is None, reason="the CPU library was not compiled"),
]

ELSEWHERE = """
import sys
for name in sys.argv[1].split(","):
    __import__(name)
import torch
assert not any(name.startswith("torch._dynamo") for name in sys.modules), "attnkit loads torch's compiler"

kind, program, arrays = sys.argv[2:]
x, golden = torch.load(arrays)
load = torch._inductor.aoti_load_package if kind == "compiled" else lambda path: torch.export.load(path).module()
with torch.no_grad():
    found = load(program)(x)
assert (found - golden).abs().max() < 1e-6
"""


def block() -> nn.Module:
    """A block of a vision transformer, with relu."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    swap(model, "relu")
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, torch.export.ExportedProgram]:
    """A folder with the program of a block, and what it is called with and returns."""
    folder, model, x = tmp_path_factory.mktemp("saved"), block(), torch.randn(2, 9, 16)
    with torch.no_grad():
        golden: Tensor = model(x)
        program = torch.export.export(model, (x,))
    assert any("attnkit" in str(node.target) for node in program.graph.nodes)
    torch.save((x, golden), folder / "arrays.pt")
    torch.export.save(program, folder / "exported.pt2")
    return folder, program


def loads(imports: str, kind: str, folder: Path) -> None:
    command = [sys.executable, "-c", ELSEWHERE, imports, kind, str(folder / f"{kind}.pt2"), str(folder / "arrays.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_exported_model_is_loaded_where_attnkit_is_imported_before_torch(saved):
    loads("attnkit,torch,attnkit.integrations.torch", "exported", saved[0])


@pytest.mark.emulated
def test_an_exported_model_is_loaded_where_attnkit_is_imported_after_torch(saved):
    loads("torch,attnkit", "exported", saved[0])


@pytest.mark.emulated
def test_a_package_of_aot_inductor_is_loaded(saved):
    """Half a minute of compiling C++."""
    folder, program = saved
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "compiled.pt2"))
    for imports in ("attnkit,torch", "torch,attnkit"):
        loads(imports, "compiled", folder)
