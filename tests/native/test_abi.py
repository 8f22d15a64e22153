"""The mirror of attnkit.h: what it holds in the order in which it holds it."""

import ctypes
import re

import pytest

from attnkit._core.activations import NAMES
from attnkit.backends.native import abi, build

HEADER = re.sub(r"/\*.*?\*/", "", (build.SOURCES / "attnkit.h").read_text(), flags=re.DOTALL)
C_TYPES = {
    "uint32_t": ctypes.c_uint32,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "double": ctypes.c_double,
    "attnkit_view": abi.View,
}


def constants(enum: str) -> dict[str, int]:
    """Names without prefix, in lower case, and their values."""
    body = re.search(rf"enum {enum}\s*\{{(.*?)\}}", HEADER, re.DOTALL)[1]
    found, value = {}, -1
    for item in filter(None, map(str.strip, body.split(","))):
        name, _, given = map(str.strip, item.partition("="))
        value = int(given) if given else value + 1
        found[name.removeprefix("ATTNKIT_").lower()] = value
    return found


def fields(struct: str) -> list[tuple[str, type]]:
    body = next(
        text for text, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", HEADER, re.DOTALL) if name == struct
    )
    lengths = {"ATTNKIT_AXES": abi.AXES, "ATTNKIT_ARRAYS": len(abi.ARRAYS)}
    found = []
    for kind, name, _, size in re.findall(r"(\w+) (\w+)(\[(\w+)\])?;", body):
        found.append((name, C_TYPES[kind] * lengths[size] if size else C_TYPES[kind]))
    return found


def test_constants():
    numbers = constants("")
    assert numbers == {"version": abi.VERSION, "axes": abi.AXES, "row_numbers": abi.ROW_NUMBERS}
    assert constants("attnkit_dtype") == {"absent": 0} | abi.DTYPES
    assert [f"{name}_attention" for name in constants("attnkit_op")] == list(abi.OPS)
    assert [*constants("attnkit_op").values()] == [*abi.OPS.values()]
    assert constants("attnkit_pass") == {"forward": abi.FORWARD, "backward": abi.BACKWARD}
    assert constants("attnkit_length") == {
        "length_number": abi.LENGTH_NUMBER,
        "length_visible": abi.LENGTH_VISIBLE,
        "length_array": abi.LENGTH_ARRAY,
        "length_all": abi.LENGTH_ALL,
    }
    codes = constants("attnkit_code")
    assert [codes[name] for name in ("unsupported", "no_memory", "bad_edges")] == [
        abi.UNSUPPORTED,
        abi.NO_MEMORY,
        abi.BAD_EDGES,
    ]


def test_activations_are_told_by_name(library):
    """In any order of attnkit's table: a function that the library lacks has no number, whatever its place there."""
    numbers = constants("attnkit_activation")
    assert numbers.pop("no_activation") == abi.NO_ACTIVATION
    assert numbers.pop("activations") == len(numbers)
    assert {name: library.activation(name.encode()) for name in numbers} == numbers
    assert numbers.keys() <= {*NAMES}
    for unknown in ("mish", "", "relu ", "Relu"):
        assert library.activation(unknown.encode()) == abi.NO_ACTIVATION


def test_feature_maps_have_the_numbers_of_their_names():
    numbers = constants("attnkit_feature_map")
    of_kernels = {f"{name}_kernel": number for name, number in abi.KERNELS.items()}
    assert {name.removesuffix("_features"): x for name, x in numbers.items()} == abi.FEATURE_MAPS | of_kernels


def test_arrays():
    renamed = {"lengths": "length", "arrays": None}
    found = constants("attnkit_array")
    assert [renamed.get(name, name) for name in found] == [*abi.ARRAYS, None]
    assert [*found.values()] == [*range(len(abi.ARRAYS) + 1)]


@pytest.mark.parametrize(("struct", "mirror"), [("attnkit_view", abi.View), ("attnkit_plan", abi.Plan)])
def test_fields(struct, mirror):
    mirrored = [(name.removesuffix("_"), kind) for name, kind in mirror._fields_]
    assert mirrored == fields(struct)
