"""The structs and numbers of `attnkit/kernels/cpu/attnkit.h`, mirrored for ctypes."""

import ctypes
import struct

from attnkit.ops.entmax import ENTMAX
from attnkit.ops.forgetting import FORGETTING
from attnkit.ops.gaussian import GAUSSIAN
from attnkit.ops.linear.attention import LINEAR
from attnkit.ops.linear.cosine import COSINE
from attnkit.ops.linear.efficient import EFFICIENT
from attnkit.ops.linear.performer import PERFORMER
from attnkit.ops.pointwise import POINTWISE
from attnkit.ops.recurrent.delta import DELTA
from attnkit.ops.recurrent.gated_linear import GATED_LINEAR
from attnkit.ops.softmax import SOFTMAX
from attnkit.ops.softpick import SOFTPICK
from attnkit.ops.stick_breaking import STICK_BREAKING

VERSION = 10
AXES = 6
ROW_NUMBERS = 7

FORWARD, BACKWARD = 0, 1
BAD_ALIGNMENT, UNSUPPORTED, NO_MEMORY, BAD_EDGES, INTERRUPTED = 5, 6, 7, 8, 9
SIZES = {
    **{"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "bool": 1},
    **{"int32": 4, "int64": 8, "uint32": 4, "uint64": 8, "int16": 2, "uint16": 2, "int8": 1, "uint8": 1},
}
"""Bytes of an element, by dtype in the order of their numbers."""
DTYPES = {name: number for number, name in enumerate(SIZES, start=1)}
OPS = {
    name: number
    for number, name in enumerate(
        (
            *(POINTWISE.name, SOFTMAX.name, ENTMAX.name, GAUSSIAN.name),
            *(LINEAR.name, COSINE.name, PERFORMER.name, EFFICIENT.name),
            *(SOFTPICK.name, STICK_BREAKING.name, FORGETTING.name, GATED_LINEAR.name, DELTA.name),
        )
    )
}
NO_ACTIVATION = -1
"""What attnkit_activation says of a name that it does not know. Their numbers have no mirror: it is asked for each."""
FEATURE_MAPS = {"elu_plus_one": 0, "relu": 1, "identity": 2}
KERNELS = {"softmax": 3, "relu": 4}
"""Of Performer."""
LENGTH_NUMBER, LENGTH_VISIBLE, LENGTH_ARRAY, LENGTH_ALL = range(4)
ARRAYS = (
    *("q", "k", "v", "bias", "mask", "key_lengths", "query_mask", "dropout_mask", "seed", "length", "alpha"),
    *("sink", "projection", "state", "normaliser", "level", "log_decay", "log_forget"),
    *("beta", "log_gate", "edges_q", "edges_k"),
    *("o", "lse", "rows", "total", "entropy", "sum_squares", "maximum", "nonzero", "visible"),
    *("final_state", "final_normaliser", "final_level"),
    *("do", "dlse", "dtotal", "dentropy", "dsum_squares", "dmaximum"),
    *("dfinal_state", "dfinal_normaliser", "dfinal_level"),
    *("dq", "dk", "dv", "dbias", "dalpha", "dsink", "dstate", "dnormaliser", "dlevel", "dlog_decay", "dlog_forget"),
    *("dbeta", "dlog_gate"),
)
"""Arrays of a call in the order of their pointers."""
INDEX = {name: index for index, name in enumerate(ARRAYS)}
INDEX |= {"r": INDEX["lse"], "dr": INDEX["dlse"]}  # the remainder of stick-breaking attention, in the place of lse
Axes = ctypes.c_int64 * AXES


class View(ctypes.Structure):
    """Dtype and strides, in elements, of an array; dtype 0 where it is absent."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("axes", Axes),
        ("row", ctypes.c_int64),
        ("column", ctypes.c_int64),
    )


class Plan(ctypes.Structure):
    """What attnkit_run knows of a call beside the pointers."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("size", "version")),
        *((name, ctypes.c_int32) for name in ("op", "pass_", "activation", "length_kind", "log_length", "exact_zeros")),
        *((name, ctypes.c_int32) for name in ("feature_map", "normalize", "hides_tokens", "reserved")),
        ("axes", Axes),
        *((name, ctypes.c_int64) for name in ("queries", "keys", "features", "values", "projected")),
        *((name, ctypes.c_int64) for name in ("lowest", "highest", "key_length", "sequences", "before", "after")),
        ("heads", Axes),
        ("items", Axes),
        *((name, ctypes.c_double) for name in ("scale", "gain", "alpha", "shift", "length", "dropout", "eps", "sink")),
        ("log_decay", ctypes.c_double),
        ("arrays", View * len(ARRAYS)),
    )


VIEW = struct.Struct(f"2i{AXES + 2}q")
"""A `View` as one line of numbers."""
OFFSETS = {name: Plan.arrays.offset + index * VIEW.size for name, index in INDEX.items()}
"""Of the view of each array in a plan."""
