"""torch.export and ONNX export of the generic bodies, of dynamic batch and length: every case, or those named.

    python -m tests.integrations.exports [OP ...]

tests/integrations/test_export.py runs a few of them; all take minutes.
"""

import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

import attnkit


class Case(NamedTuple):
    op: str
    options: Mapping[str, Any] = MappingProxyType({})
    others: tuple[tuple[int, ...], ...] = ()  # shapes of what the op takes behind q, k, v
    longest: int = 16  # tokens


CASES = (
    Case("softmax_attention"),
    Case("softmax_attention", {"causal": True}),
    Case("pointwise_attention", {"alpha": 0.5}),
    Case("pointwise_attention", {"causal": True, "activation": "gelu"}),
    Case("reluformer_attention"),
    Case("sigmoid_attention"),
    Case("sparsemax_attention"),
    Case("entmax_attention"),
    Case("entmax_attention", {"alpha": 1.25}),
    Case("gaussian_attention"),
    Case("softpick_attention"),
    Case("ssmax_attention"),
    Case("stick_breaking_attention", {"attend_current": True}),
    Case("rela_attention", others=((8,),)),
    Case("sima_attention"),
    Case("linear_attention", longest=4096),
    Case("cosine_attention"),
    Case("efficient_attention"),
    Case("performer_attention", others=((8, 4),)),
    Case("linformer_attention", others=((3, 32), (3, 32))),
)


class Call(nn.Module):
    """An op as a module, which is what is exported."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def forward(self, *arrays: Tensor) -> Tensor:
        out: Tensor = getattr(attnkit, self.case.op)(*arrays, impl="generic", **self.case.options)
        return out


def arrays(case: Case, batch: int, length: int) -> tuple[Tensor, ...]:
    """q, k, v (batch, 2, length, 4) and the others."""
    generator = torch.Generator().manual_seed(batch)
    heads = [torch.randn(batch, 2, length, 4, generator=generator) for _ in range(3)]
    fixed = torch.Generator().manual_seed(0)
    return (*heads, *(torch.randn(*shape, generator=fixed) for shape in case.others))


def exported(case: Case, strict: bool = False) -> ExportedProgram:
    """The op for 2 to 64 items of 2 to `longest` tokens."""
    given = arrays(case, 2, 6)
    free = {0: Dim("batch", min=2, max=64), 2: Dim("length", min=2, max=case.longest)}
    shapes = tuple(free if n < 3 else {} for n in range(len(given)))
    return export(Call(case), given, dynamic_shapes=(shapes,), strict=strict)


def error_of_export(case: Case, program: ExportedProgram) -> float:
    """Largest difference between a program and the op on sizes that it has not seen, over the largest output."""
    given = arrays(case, 3, 9)
    golden = Call(case)(*given)
    return float((program.module()(*given) - golden).abs().max() / golden.abs().max())


def error_of_onnx(case: Case, program: ExportedProgram) -> float:
    """The same for the ONNX model of a program, run by ONNX Runtime."""
    import onnxruntime

    given = arrays(case, 3, 9)
    model = torch.onnx.export(program, given, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(model.model_proto.SerializeToString())
    named = {slot.name: x.numpy() for slot, x in zip(session.get_inputs(), given, strict=True)}
    golden = Call(case)(*given).numpy()
    return float(np.abs(session.run(None, named)[0] - golden).max() / np.abs(golden).max())


def main(names: list[str]) -> None:
    """Print the errors of every case."""
    for case in CASES:
        if names and case.op not in names:
            continue
        start = time.process_time()
        program = exported(case)
        line = f"{case.op} {dict(case.options)}: export {error_of_export(case, program):.1e}"
        line += f", ONNX {error_of_onnx(case, program):.1e}"
        print(f"{line} ({time.process_time() - start:.0f} s of CPU)", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
