"""A call on sharded arrays under jit: each device serves its part of the leading axes, with a plan of its own.

Tokens and features are gathered, for a custom call needs all of them, and so are packed sequences. Gradients of an
argument that is shared along an axis are added up over the devices.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations, product
from typing import NamedTuple

import jax
from jax import Array
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attnkit._core.typing import AnyFunction, OfLibrary
from attnkit.backends.jax.formula import Call
from attnkit.backends.native import linear, lower

Foreign = Callable[..., list[Array]]
Names = tuple[str, ...]  # of axes of a mesh
Typed = OfLibrary  # an array, or shape, dtype and sharding of one
Places = tuple[int | None, ...]
"""By dimension of an array, the leading axis that it is, and that may be divided; None for every other."""


def is_divided(context: object) -> bool:
    """Whether a program is for several devices, among which XLA divides arrays. In a shard_map each has its own."""
    return getattr(context, "num_devices", 1) > 1 and getattr(context, "abstract_mesh", None) is not None


class Layout(NamedTuple):
    """The leading axes of a call, heads of k for those of q, and where they are in its arguments and results."""

    sizes: lower.Shape
    groups: int
    arguments: tuple[Places, ...]
    results: tuple[Places, ...]


def layout(call: Call, shapes: Mapping[str, lower.Shape], results: Sequence[lower.Shape]) -> Layout:
    """Of a call on arrays of these shapes; groups of query heads stay together."""
    if lower.EDGES[0] in shapes:
        leading: lower.Shape = ()
        groups = 1
    else:
        leading = call.leading(shapes)
        groups = leading[-1] // max(1, shapes["k"][-3]) if dict(call.plain).get("enable_gqa") else 1
    sizes = (*leading[:-1], leading[-1] // groups) if groups > 1 else leading

    def places(name: str, shape: lower.Shape) -> Places:
        own = max(0, len(shape) - lower.trailing_axes(name)) if leading else 0
        first = len(leading) - own
        found = [
            axis if sizes[axis] > 1 and size in (sizes[axis], leading[axis]) else None
            for axis, size in enumerate(shape[:own], first)
        ]
        return (*found, *[None] * (len(shape) - own))

    arguments = {name: places(name, shape) for name, shape in shapes.items()}
    # what a state's cotangent gives to gradients is no sum over an axis that the state lacks
    whole = [set(places) for name, places in arguments.items() if name in linear.COTANGENTS]
    kept = [axis for axis in range(len(leading)) if all(axis in axes for axes in whole)]

    def divisible(places: Places) -> Places:
        return tuple(axis if axis in kept else None for axis in places)

    of_results = (places(name, shape) for name, shape in zip(call.outputs, results, strict=True))
    return Layout(sizes, groups, tuple(map(divisible, arguments.values())), tuple(map(divisible, of_results)))


def over_leading_axes(
    call: Call, foreign: Foreign, arguments: Sequence[Typed], results: Sequence[Typed]
) -> AnyFunction:
    """`foreign(call, *arrays)` for arguments and results like these, divided as XLA has divided them."""
    shapes = call.shapes(arguments)
    at = layout(call, shapes, [x.shape for x in results])
    shared = [_shared(at, name, places) for name, places in zip(call.outputs, at.results, strict=True)]

    def partition(
        mesh: Mesh, arguments: Sequence[Typed], results: Sequence[Typed]
    ) -> tuple[Mesh, Foreign, list[NamedSharding], tuple[NamedSharding, ...]]:
        names = _names(at, mesh, [_entries(mesh, x) for x in (*arguments, *results)])
        sums = [tuple(name for axis in axes for name in names.get(axis, ())) for axes in shared]

        def local(*arrays: Array) -> list[Array]:
            outputs = foreign(call, *arrays)
            return [jax.lax.psum(x, axes) if axes else x for x, axes in zip(outputs, sums, strict=True)]

        def shardings(arrays: tuple[Places, ...]) -> list[NamedSharding]:
            return [NamedSharding(mesh, PartitionSpec(*(names.get(axis) for axis in places))) for places in arrays]

        return mesh, local, shardings(at.results), tuple(shardings(at.arguments))

    def whole(*arrays: Array) -> list[Array]:
        return foreign(call, *arrays)

    divided = custom_partitioning(whole)
    rule, gathered, factors = _rule(at, [x.shape for x in arguments], [x.shape for x in results])
    divided.def_partition(
        partition, decode_shardings=False, sharding_rule=rule, need_replication_factors=gathered, **factors
    )
    return divided


def explicit(call: Call, arguments: Sequence[Typed], results: Sequence[lower.Shape]) -> list[PartitionSpec]:
    """How results of these shapes are sharded over axes of a mesh that are explicit, as arguments are."""
    mesh = next((x.sharding.mesh for x in arguments if not x.sharding.mesh.empty), None)
    if mesh is None or not any(entry for x in arguments for entry in x.sharding.spec):
        return [PartitionSpec()] * len(results)
    at = layout(call, call.shapes(arguments), results)
    names = _names(at, mesh, [x.sharding.spec for x in arguments])
    return [PartitionSpec(*(names.get(axis) for axis in places)) for places in at.results]


def _shared(at: Layout, name: str, places: Places) -> list[int]:
    """The axes over which a gradient is a sum."""
    return [axis for axis in range(len(at.sizes)) if axis not in places] if name[0] == "d" else []


def _entries(mesh: Mesh, x: Typed) -> Sequence[Names]:
    """By dimension, the axes of the mesh over which an array is sharded; none where it is over parts of axes, as heads
    of queries are over more devices than there are heads of keys."""
    try:
        numbers = [size // part for size, part in zip(x.shape, x.sharding.shard_shape(x.shape), strict=True)]
    except ValueError:  # the parts are not alike
        return ()
    orders = [order for n in range(len(mesh.axis_names) + 1) for order in permutations(mesh.axis_names, n)]
    fitting = [[order for order in orders if math.prod(map(mesh.shape.get, order)) == number] for number in numbers]
    for entries in product(*fitting):
        names = [name for order in entries for name in order]
        named = NamedSharding(mesh, PartitionSpec(*entries)) if len(set(names)) == len(names) else None
        if named is not None and named.is_equivalent_to(x.sharding, len(x.shape)):
            return entries
    return ()


def _names(at: Layout, mesh: Mesh, arrays: Sequence[Sequence[str | Names | None]]) -> dict[int | None, Names]:
    """By leading axis, the axes of the mesh among which it is divided: by the entries of the first array that is."""
    found: dict[int | None, Names] = {}
    for places, entries in zip((*at.arguments, *at.results), arrays, strict=False):
        for axis, entry in zip(places, entries, strict=False):
            names: Names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
            if (
                axis is None
                or axis in found
                or not names
                or set(names) & {n for several in found.values() for n in several}
            ):
                continue
            if at.sizes[axis] % math.prod(mesh.shape[name] for name in names) == 0:
                found[axis] = names
    return found


def _rule(
    at: Layout, arguments: Sequence[lower.Shape], results: Sequence[lower.Shape]
) -> tuple[str, Names, dict[str, int]]:
    """The rule of Shardy: a factor for each leading axis, and those that are gathered in the order of the text."""
    gathered, groups = list[str](), "g"

    def text(places: Places, shape: lower.Shape) -> Iterator[str]:
        for axis, size in zip(places, shape, strict=True):
            if axis is None:
                gathered.append(f"r{len(gathered)}")
                yield gathered[-1]
            elif size == at.sizes[axis]:
                yield f"a{axis}"
            else:
                gathered.extend(() if groups in gathered else (groups,))
                yield f"(a{axis} {groups})"

    sides = [
        ", ".join(" ".join(text(*pair)) for pair in zip(arrays, shapes, strict=True))
        for arrays, shapes in ((at.arguments, arguments), (at.results, results))
    ]
    return " -> ".join(sides), tuple(gathered), {groups: at.groups} if groups in gathered else {}
