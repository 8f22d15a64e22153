"""The test vectors of a release: what they hold, their checksums, and readers in C and in JavaScript."""

import inspect
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import attnkit_reference
from attnkit_conformance.__main__ import main
from attnkit_conformance.golden import draw_case, golden
from attnkit_conformance.opdb import BY_NAME, OPDB
from attnkit_conformance.report import exchange
from attnkit_conformance.report.exchange import vectors
from attnkit_conformance.scenes import rows
from tests.shared import made_once

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples" / "vectors"
OPTIONS = {
    "a": {"causal", "mask", "query_mask", "key_lengths", "bias", "enable_gqa"},
    "b": {"causal", "mask", "query_mask", "key_lengths", "enable_gqa"},
    "c": {"causal", "mask", "query_mask", "key_lengths", "enable_gqa"},
    "d": {"query_mask", "key_lengths"},
    "e": {"causal", "mask"},
    "f": {"mask", "key_lengths", "initial_S", "chunk_size", "return_state"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "vectors", lambda folder: vectors.write(folder / "set")) / "set"


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.mark.referee
def test_every_op_is_there_with_its_options_and_null_rows_within_the_limit(folder: Path) -> None:
    assert sum(path.stat().st_size for path in folder.iterdir()) <= vectors.LIMIT
    cases = exchange.read_manifest(folder)["cases"]
    names = [line.split()[:2] for line in (folder / "tensors.txt").read_text().splitlines()]
    for op in OPDB:
        held = [case for case in cases if case["op"] == op.name]
        assert {case["dtype"] for case in held} == {"float32", "float64"} & set(op.dtypes), op.name
        given = [name.split(".", 1) for identity, name in names if identity.startswith(f"{op.name}/")]
        kinds = {"in", "out", "allowed"} | ({"cotangent", "grad"} if op.vjp else set())
        assert {kind for kind, _ in given} == kinds, op.name
        seen = {name for case in held for name in case["params"]} | {name for _, name in given}
        missing = OPTIONS.get(op.group, set()) - seen
        if missing and "causal" not in inspect.signature(getattr(attnkit_reference, op.name)).parameters:
            missing -= {"causal"}  # stick-breaking and forgetting attention are causal by themselves
        assert not missing, op.name
    for name in ("softmax_attention", "pointwise_attention", "linear_attention"):
        o = load_file(folder / f"{name}.safetensors")
        assert any(np.any(np.all(x == 0, axis=-1)) for key, x in o.items() if key.endswith("out.o")), "no null row"


def test_integers_are_int64_whatever_a_case_has(folder: Path) -> None:
    """Lengths of cases have any integer dtype, and may be the largest of uint64."""
    of_inputs = {line.split()[5] for line in (folder / "tensors.txt").read_text().splitlines() if " in." in line}
    assert of_inputs == {"bool", "float32", "float64", "int64"}
    for dtype in ("int8", "uint8", "int64", "uint64"):
        most = np.iinfo(dtype).max
        x = exchange.as_read(np.array([0, 3, most], dtype))
        assert x.dtype == np.int64
        assert x.tolist() == [0, 3, min(int(most), 2**63 - 1)]


def test_the_size_is_held_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = list(vectors.small_cases(OPDB[0], "float32"))
    monkeypatch.setattr(vectors, "cases", lambda: iter(few))
    assert vectors.write(tmp_path / "few") == len(few)
    monkeypatch.setattr(vectors, "LIMIT", 10_000)
    with pytest.raises(ValueError, match="expected at most 10000"):
        vectors.write(tmp_path / "few")


def test_bytes_are_the_same_every_time(folder: Path, tmp_path: Path) -> None:
    chosen = {"softmax_attention_weights", "linear_attention_step", "key_value_memory"}
    for name in ("one", "two"):
        exchange.write(tmp_path / name, (case for op in OPDB if op.name in chosen for case in vectors.of_op(op)))
    one, two = (sorted((path.name, path.read_bytes()) for path in (tmp_path / n).iterdir()) for n in ("one", "two"))
    assert one == two
    for op in chosen:
        assert (tmp_path / "one" / f"{op}.safetensors").read_bytes() == (folder / f"{op}.safetensors").read_bytes()


def test_lines_say_what_the_manifest_and_the_files_say(folder: Path) -> None:
    manifest = exchange.read_manifest(folder)
    assert manifest["semantics"] == int(
        re.findall(r"semantics version (\d+)", (ROOT / "docs/semantics.md").read_text())[0]
    )
    assert manifest["attnkit"] == re.findall(r'__version__ = "(.+)"', (ROOT / "attnkit/__init__.py").read_text())[0]
    results = {f"{c['id']}/{name}": dtype for c in manifest["cases"] for name, dtype in c["results"].items()}
    assert {"float32", "float64"} <= {*results.values()} <= {"float32", "float64", "integer"}
    tensors = {n: x for file in folder.glob("*.safetensors") for n, x in exchange.read_tensors(file)}
    for line in (folder / "tensors.txt").read_text().splitlines():
        case, name, file, offset, size, dtype, shape = line.split(" ")
        x = tensors.pop(f"{case}/{name}")
        with (folder / file).open("rb") as held:
            held.seek(int(offset))
            assert held.read(int(size)) == x.tobytes(), line
        assert (list(x.shape), x.dtype.name) == (json.loads(shape), dtype)
        if name.startswith("allowed."):
            assert f"{case}/{name.removeprefix('allowed.')}" in results
            assert np.all(x >= 0)
        elif name.startswith(("out.", "grad.")):
            results.pop(f"{case}/{name}")
    assert tensors == results == {}
    params: dict[str, dict[str, object]] = {case["id"]: {} for case in manifest["cases"]}
    for line in (folder / "params.txt").read_text().splitlines():
        case, name, value = line.split(" ")
        params[case][name] = json.loads(value)
    assert params == {case["id"]: case["params"] for case in manifest["cases"]}


@pytest.mark.parametrize("name", ["pointwise_attention.safetensors", "params.txt", "manifest.json"])
def test_a_changed_file_is_noticed(folder: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    data = bytearray((copy / name).read_bytes())
    data[-2] ^= 1
    if name == "manifest.json":
        data[-2:] = b" }\n"
    (copy / name).write_bytes(data)
    assert main(["compare", str(copy), str(tmp_path)]) == 2
    assert f"{name}: the checksum" in capsys.readouterr().err
    done = subprocess.run(
        [tool("sha256sum"), "-c", "SHA256SUMS"], cwd=copy, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"{name}: FAILED" in done.stdout


def judged_and_read_bit_for_bit(folder: Path, case: str, mine: Path) -> None:
    """What an example wrote: inputs as they were, and an output that `compare` accepts, but not with a wrong entry."""
    tensors, known = load_file(mine), load_file(folder / f"{case.partition('/')[0]}.safetensors")
    for name in ("in.q", "in.k", "in.v"):
        ours, theirs = known[f"{case}/{name}"], tensors[f"{case}/{name}"]
        assert (theirs.dtype, theirs.shape, theirs.tobytes()) == (ours.dtype, ours.shape, ours.tobytes())
    assert main(["compare", str(folder), str(mine)]) == 0
    output = f"{case}/out.o"
    wrong = tensors[output].copy()
    wrong.flat[-1] *= 1 + 1e-3
    save_file({**tensors, output: wrong}, mine)
    assert main(["compare", str(folder), str(mine)]) == 1


@pytest.fixture(scope="module")
def softmax_attention(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("c") / "softmax_attention"
    done = run(tool("cc"), "-O2", "-Wall", "-Wextra", "-Werror", EXAMPLES / "softmax_attention.c", "-lm", "-o", program)
    assert done.returncode == 0, done.stderr
    return program


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_vectors_pass_through_the_reader_in_c(
    softmax_attention: Path, folder: Path, tmp_path: Path, dtype: str
) -> None:
    case, mine = f"softmax_attention/{dtype}/small-cross", tmp_path / "mine.safetensors"
    done = run(softmax_attention, folder, case, mine)
    assert done.returncode == 0, done.stdout + done.stderr
    judged_and_read_bit_for_bit(folder, case, mine)


def test_the_example_in_c_sees_that_it_is_wrong(folder: Path, tmp_path: Path) -> None:
    source = (EXAMPLES / "softmax_attention.c").read_text()
    planted = source.replace("exp(w[j] - top)", "exp(w[j] - top) * (j != 3)")
    assert planted != source
    shutil.copy(EXAMPLES / "read_vectors.h", tmp_path)
    (tmp_path / "planted.c").write_text(planted)
    assert run(tool("cc"), "-O0", tmp_path / "planted.c", "-lm", "-o", tmp_path / "planted").returncode == 0
    done = run(tmp_path / "planted", folder, "softmax_attention/float32/small-cross", tmp_path / "mine")
    assert done.returncode == 1, done.stdout + done.stderr
    gone = run(tmp_path / "planted", folder, "softmax_attention/float32/gone", tmp_path / "mine")
    assert (gone.returncode, gone.stdout) == (2, "")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_vectors_pass_through_the_reader_in_javascript(folder: Path, tmp_path: Path, dtype: str) -> None:
    case, mine = f"pointwise_attention/{dtype}/small-cross", tmp_path / "mine.safetensors"
    done = run(tool("node"), EXAMPLES / "pointwise_attention.mjs", folder, case, mine)
    assert done.returncode == 0, done.stdout + done.stderr
    judged_and_read_bit_for_bit(folder, case, mine)


def test_the_example_in_javascript_sees_that_it_is_wrong(folder: Path, tmp_path: Path) -> None:
    for path in EXAMPLES.glob("*.mjs"):
        (tmp_path / path.name).write_text(path.read_text().replace("Math.max(s, 0)", "Math.max(s, 0.01)"))
    example = [tool("node"), tmp_path / "pointwise_attention.mjs", folder]
    assert run(*example, "pointwise_attention/float64/small-cross", tmp_path / "mine").returncode == 1
    done = run(*example, "pointwise_attention/float64/gone", tmp_path / "mine")
    assert "has no case pointwise_attention/float64/gone" in done.stderr


ODD = (
    "batch=none", "batch=broadcast", "heads=grouped", "mask=2d", "bias=2d", "query_mask=some", "key_lengths=some",
    "key_lengths=number", "scale=0.7", "dropout=seed", "causal=lower_right", "window=left", "plain", "width=1x1",
)  # fmt: skip
"""Rows of a grammar, of which an example knows the last two."""


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calls with what the examples do not know, and half types."""

    def write(folder: Path) -> None:
        cases = []
        for op in ("softmax_attention", "pointwise_attention"):
            for dtype, names in (
                ("float32", ODD),
                ("float64", ("plain",)),
                ("float16", ODD[-2:]),
                ("bfloat16", ODD[-2:]),
            ):
                cases += [draw_case(rows.sample_named(BY_NAME[op], dtype, f"pair.{name}")) for name in names]
        exchange.write(folder / "set", cases)

    return made_once(tmp_path_factory, "odd_vectors", write) / "set"


def ids_of(folder: Path, op: str) -> list[str]:
    """All cases of an op, and one of every other op."""
    cases = exchange.read_manifest(folder)["cases"]
    others = {case["op"]: case["id"] for case in cases}
    return [*(case["id"] for case in cases if case["op"] == op), *(others[name] for name in others if name != op)]


def is_plain(folder: Path) -> set[str]:
    """The cases that the examples know: float32 or float64, four axes each, equal batches and heads, no options."""
    lines = [line.split(" ") for line in (folder / "tensors.txt").read_text().splitlines()]
    inputs: dict[str, list[tuple[str, list[int]]]] = {}
    for case, name, _, _, _, dtype, shape in lines:
        if name.startswith(("in.", "out.")):
            inputs.setdefault(case, []).append((name if dtype.startswith("float") else dtype, json.loads(shape)))
    named = {line.split(" ")[0] for line in (folder / "params.txt").read_text().splitlines()}
    return {
        case
        for case, tensors in inputs.items()
        if sorted(name for name, _ in tensors) == ["in.k", "in.q", "in.v", "out.o"]
        and all(len(shape) == 4 and shape[:2] == tensors[0][1][:2] for _, shape in tensors)
        and case.split("/")[1] in ("float32", "float64")
        and case not in named
    }


def known(folder: Path, op: str) -> set[str]:
    return {case for case in is_plain(folder) if case.startswith(f"{op}/")}


@pytest.mark.parametrize("name", ["folder", "odd"])
def test_every_case_is_right_or_refused_by_the_example_in_c(
    softmax_attention: Path, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    held = request.getfixturevalue(name)
    right = known(held, "softmax_attention")
    assert right
    for case in ids_of(held, "softmax_attention"):
        done = run(softmax_attention, held, case, tmp_path / "mine")
        assert done.returncode == (0 if case in right else 2), (case, done.stdout, done.stderr)
        if case in right:
            assert f"{case}: 0 of " in done.stdout
        else:
            assert re.match(rf"{re.escape(case)}: .* known", done.stderr), (case, done.stderr)


DRIVER = """
import { judge } from "./pointwise_attention.mjs";
import { Refusal } from "./read_vectors.mjs";

for (const id of process.argv.slice(3)) {
  try {
    console.log(`${id} ${judge(process.argv[2], id).wrong}`);
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    console.log(`${id} refused ${error.message}`);
  }
}
"""


@pytest.mark.parametrize("name", ["folder", "odd"])
def test_every_case_is_right_or_refused_by_the_example_in_javascript(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    held = request.getfixturevalue(name)
    for path in EXAMPLES.glob("*.mjs"):
        shutil.copy(path, tmp_path)
    (tmp_path / "driver.mjs").write_text(DRIVER)
    ids, right = ids_of(held, "pointwise_attention"), known(held, "pointwise_attention")
    assert right
    done = run(tool("node"), tmp_path / "driver.mjs", held, *ids)
    assert done.returncode == 0, done.stderr
    told = {line.split(" ")[0]: line.split(" ", 1)[1] for line in done.stdout.splitlines()}
    assert list(told) == ids
    for case, text in told.items():
        assert text == "0" if case in right else re.match(rf"refused {re.escape(case)}: .* known", text), (case, text)


def test_the_example_in_javascript_refuses_with_a_sentence(odd: Path, tmp_path: Path) -> None:
    case = "pointwise_attention/float16/pair.plain"
    done = run(tool("node"), EXAMPLES / "pointwise_attention.mjs", odd, case, tmp_path / "mine")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{case}: ")
    assert "has dtype float16" in done.stderr


OUTPUT, GRADIENT = "softmax_attention/float32/small-cross/out.o", "softmax_attention/float32/small-cross/grad.v"


def entry(of: str, value: float) -> Any:
    """Results with another number as the eighth entry of one."""

    def plant(results: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        wrong = results[of].copy()
        wrong.flat[7] = value
        return {**results, of: wrong}

    return plant


PLANTED: dict[str, tuple[Any, int, str]] = {
    "zeros": (lambda x: {**x, OUTPUT: 0 * x[OUTPUT]}, 1, "[bound] out.o: off by"),
    "entry": (lambda x: entry(OUTPUT, x[OUTPUT].flat[7] * 1.001)(x), 1, "[bound] out.o: off by"),
    "nan": (entry(OUTPUT, np.nan), 1, "[nonfinite] out.o"),
    "infinity": (entry(GRADIENT, np.inf), 1, "[nonfinite] grad.v"),
    "dtype": (lambda x: {**x, OUTPUT: x[OUTPUT].astype("f8")}, 1, "[dtype] out.o has dtype float64; expected float32"),
    "shape": (lambda x: {**x, OUTPUT: x[OUTPUT].swapaxes(-1, -2).copy()}, 1, "[shape] out.o has shape"),
    "missing": (lambda x: {name: y for name, y in x.items() if name != OUTPUT}, 1, "[names] out.o is missing"),
    "none": (lambda x: {"unrelated": x[OUTPUT]}, 2, "holds none of the outputs"),
    "unknown": (lambda x: {**x, f"{OUTPUT}.2": x[OUTPUT]}, 2, "match no case"),
}


@pytest.fixture(scope="module")
def one_case(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """Vectors of a case, and right results."""
    folder = tmp_path_factory.mktemp("one")
    case = next(case for case in vectors.small_cases(OPDB[0], "float32") if case.id.endswith("small-cross"))
    exchange.write(folder, [case])
    truth = golden(case)
    right = {f"{case.id}/out.{name}": x.golden.astype(np.float32) for name, x in truth.outputs.items()}
    return folder, right | {f"{case.id}/grad.{name}": x.golden.astype("f4") for name, x in truth.gradients.items()}


@pytest.mark.parametrize("name", PLANTED)
def test_compare_tells_what_is_wrong_with_results(
    name: str, one_case: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, right = one_case
    plant, status, text = PLANTED[name]
    save_file(right, tmp_path / "right.safetensors")
    assert main(["compare", str(folder), str(tmp_path / "right.safetensors")]) == 0
    save_file(plant(right), tmp_path / "wrong.safetensors")
    assert main(["compare", str(folder), str(tmp_path / "wrong.safetensors")]) == status
    told = capsys.readouterr()
    assert text in told.out + told.err


def test_compare_tells_files_that_are_cut_or_doubled(
    one_case: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, right = one_case
    save_file(right, tmp_path / "one.safetensors")
    whole = (tmp_path / "one.safetensors").read_bytes()
    (tmp_path / "two.safetensors").write_bytes(whole)
    assert main(["compare", str(folder), str(tmp_path)]) == 2
    assert "two files hold 'softmax_attention/float32/small-cross/" in capsys.readouterr().err
    for size in (len(whole) - 4, 100, 4, 0):
        (tmp_path / "one.safetensors").write_bytes(whole[:size])
        assert main(["compare", str(folder), str(tmp_path / "one.safetensors")]) == 2
        assert "no safetensors file" in capsys.readouterr().err
