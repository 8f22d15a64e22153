"""Launches of Triton kernels, compiled for GPUs that are not here: Triton comes with the assembler."""

import ast
import contextlib
import functools
import hashlib
import importlib.util
import math
import re
import subprocess
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from attnkit.backends.torch.triton import launch as triton_launch
from attnkit.backends.torch.triton.launch import Launch
from attnkit.kernels import verdicts

TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


class Compiled(NamedTuple):
    """Machine code and what it needs."""

    cubin: bytes
    ptx: str
    warps: int  # of a program; with `warp_specialize` those of one partition
    threads: int  # of a program, all partitions together
    registers: int
    stack: int  # bytes per thread; spilled registers are there
    shared: int  # bytes per program
    tensor_memory: int  # columns per program, where products have a memory of their own (10.0); 0 elsewhere
    transfer: float  # mean bytes of a bulk copy through a descriptor

    def tensor_core_instructions(self) -> int:
        return len(re.findall(r"wgmma\.mma_async|tcgen05\.mma\.|mma\.sync", self.ptx))


def tool(name: str) -> Path:
    """A program of the CUDA toolkit that Triton comes with."""
    return Path(str(importlib.util.find_spec("triton").origin)).parent / "backends" / "nvidia" / "bin" / name  # type: ignore[union-attr]


def disassembly(cubin: bytes, name: str, *options: str) -> str:
    """What a tool prints about machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        return subprocess.run([tool(name), *options, file.name], capture_output=True, text=True, check=True).stdout


def type_of(x: Any, path: tuple[int, ...], constants: dict[Any, Any], aligned: dict[Any, Any]) -> Any:
    """Triton's type of an argument, noting constants and what is divisible by 16 as a launch does."""
    if isinstance(x, tuple):
        return tuple(type_of(part, (*path, n), constants, aligned) for n, part in enumerate(x))
    if isinstance(x, torch.Tensor):
        aligned[path] = [["tt.divisibility", 16]]
        return f"*{TYPES[x.dtype]}"
    if isinstance(x, float):
        return "fp32"
    if x is None or x == 1:
        constants[path] = x
        return "constexpr"
    if x % 16 == 0:
        aligned[path] = [["tt.divisibility", 16]]
    return "i32" if -(2**31) <= x < 2**31 else "i64"


def source_of(launch: Launch) -> tuple[ASTSource, dict[str, Any]]:
    """The source of a launch, specialised for its arguments, and the options of its compilation."""
    names = launch.kernel.arg_names
    options = {name: value for name, value in launch.constants.items() if name not in names}
    constants: dict[Any, Any] = {
        (names.index(name),): value for name, value in launch.constants.items() if name in names
    }
    signature, aligned = {names[path[0]]: "constexpr" for path in constants}, dict[Any, Any]()
    for n, x in enumerate(launch.arguments):
        signature[names[n]] = type_of(x, (n,), constants, aligned)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=aligned)
    return source, {**options, "enable_fp_fusion": True}


parsed, essence = functools.cache(ast.parse), functools.cache(verdicts.essence)


def functions_of(function: Any, found: dict[str, str] | None = None) -> dict[str, str]:
    """The code of a kernel, of all that it calls, and the constants that they name, without comments or places."""
    found = {} if found is None else found
    name = f"{function.fn.__module__}.{function.fn.__name__}"
    if name in found:
        return found
    code = textwrap.dedent(function.src)
    found[name], tree = essence(code), parsed(code)
    for node in ast.walk(tree):
        known: Any = None
        if isinstance(node, ast.Name):
            known = function.fn.__globals__.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            known = getattr(function.fn.__globals__.get(node.value.id), node.attr, None)
        if isinstance(known, triton.JITFunction) and known.fn.__module__.partition(".")[0] != "triton":
            functions_of(known, found)
        elif isinstance(node, ast.Name) and isinstance(known, bool | int | float | str | triton.language.constexpr):
            found[f"{name}: {node.id}"] = repr(getattr(known, "value", known))
    return found


def digest_of(launch: Launch) -> str:
    """Of what a launch is compiled from: functions, types, constants and tile; nothing is compiled."""
    source, options = source_of(launch)
    parts = functions_of(launch.kernel)
    for path, value in source.constants.items():
        if isinstance(value, triton.JITFunction):
            functions_of(value, parts)
            value = value.fn.__name__
        parts[str(path)] = str(value)
    text = [*sorted(parts.items()), *map(str, source.signature.items()), *sorted(map(str, options.items()))]
    return hashlib.sha256(repr(text).encode()).hexdigest()[:16]


def lowered(launch: Launch, capability: int) -> str:
    """A launch in Triton's intermediate code, which every version writes in its own way, before any optimisation."""
    source, options = source_of(launch)
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    settings, context = backend.parse_options(options), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(settings), backend.get_module_map()
    return str(source.make_ir(target, settings, *functions, context))


def compiled(launch: Launch, capability: int) -> Compiled:
    """A launch, compiled instead of run, for a compute capability such as 90."""
    source, options = source_of(launch)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage = re.search(r"REG:(\d+) STACK:(\d+)", disassembly(kernel.asm["cubin"], "cuobjdump", "-res-usage"))
    threads = re.search(r"\.reqntid\s+(\d+)", kernel.asm["ptx"])
    assert usage is not None
    assert threads is not None
    return Compiled(
        kernel.asm["cubin"], kernel.asm["ptx"], options.get("num_warps", 4), int(threads[1]), int(usage[1]),
        int(usage[2]), kernel.metadata.shared, getattr(kernel.metadata, "tmem_size", 0), _transfer(kernel.asm["ttgir"]),
    )  # fmt: skip


def _transfer(code: str) -> float:
    """The mean bytes of a copy through a descriptor, from the shapes in Triton's intermediate code."""
    sizes = []
    for line in code.splitlines():
        shapes = re.findall(r"memdesc<((?:\d+x)+)(\w+),", line) if "async_tma_copy_global_to_local" in line else []
        for shape, dtype in shapes:
            if dtype != "i64":  # a barrier
                bits = int(re.sub(r"\D", "", dtype)[:2])
                sizes.append(math.prod(map(int, shape.rstrip("x").split("x"))) * bits // 8)
    return sum(sizes) / len(sizes) if sizes else 0.0


@contextlib.contextmanager
def device_of(capability: int) -> Iterator[None]:
    """Tiles are chosen for a compute capability, there being no device to ask."""
    newest, triton_launch.NEWEST = triton_launch.NEWEST, capability // 10
    try:
        yield
    finally:
        triton_launch.NEWEST = newest
