/* The C interface of attnkit's CPU kernels.
 *
 * A call is a plan and an array of pointers. The plan says everything about a call that does not change between calls
 * of one signature: operation, options, sizes, dtypes and strides. It is never written to, so it can be cached and used
 * by many threads at once. An array that it does not describe is absent, and a gradient or another output that is absent
 * is not computed.
 *
 * Semantics are those of docs/semantics.md; the letters A1, A2, ... below refer to it. Functions return codes of
 * `enum attnkit_code` and never throw, abort or print. Results do not depend on the number of threads.
 */
#ifndef ATTNKIT_H
#define ATTNKIT_H

#include <stdint.h>

#if defined(_WIN32)
#define ATTNKIT_API __declspec(dllexport)
#else
#define ATTNKIT_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum {
    ATTNKIT_VERSION = 10,     /* of this file: rises whenever a number or a field changes */
    ATTNKIT_AXES = 6,         /* leading axes of a call, the two of GQA included */
    ATTNKIT_ROW_NUMBERS = 7   /* numbers per query in ATTNKIT_ROWS */
};

enum attnkit_code {
    ATTNKIT_OK = 0,
    ATTNKIT_BAD_PLAN = 1,     /* size or version of the plan are not those of this library */
    ATTNKIT_BAD_SIZE = 2,     /* a negative size, or one beyond 2^31 where an index has 32 bits */
    ATTNKIT_BAD_ARRAY = 3,    /* a needed array is absent, one with elements is NULL, one that the plan does not describe
                                 was passed, or an output has stride 0 where each element is another number */
    ATTNKIT_BAD_DTYPE = 4,    /* an array has a dtype that it may not have */
    ATTNKIT_BAD_ALIGNMENT = 5, /* a pointer is not a multiple of the size of its elements */
    ATTNKIT_UNSUPPORTED = 6,  /* legal, but not served by this library: use another implementation */
    ATTNKIT_NO_MEMORY = 7,    /* working memory could not be allocated; outputs are undefined */
    ATTNKIT_BAD_EDGES = 8,    /* boundaries of packed sequences do not rise from 0 to the number of tokens */
    ATTNKIT_INTERRUPTED = 9   /* a signal came (attnkit_listen); outputs are undefined */
};

enum attnkit_dtype {
    ATTNKIT_ABSENT = 0,
    ATTNKIT_FLOAT64 = 1,
    ATTNKIT_FLOAT32 = 2,
    ATTNKIT_BFLOAT16 = 3,
    ATTNKIT_FLOAT16 = 4,
    ATTNKIT_BOOL = 5,         /* a byte, 0 or 1 */
    ATTNKIT_INT32 = 6,
    ATTNKIT_INT64 = 7,
    ATTNKIT_UINT32 = 8,
    ATTNKIT_UINT64 = 9,
    ATTNKIT_INT16 = 10,
    ATTNKIT_UINT16 = 11,
    ATTNKIT_INT8 = 12,
    ATTNKIT_UINT8 = 13
};

/* What is computed. Special cases are options of these: reluformer and sigmoid are pointwise (B), rela's product is
 * pointwise with alpha 0, sparsemax is entmax with alpha 2, entmax with the number 1 is softmax. */
enum attnkit_op {
    ATTNKIT_POINTWISE = 0,
    ATTNKIT_SOFTMAX = 1,
    ATTNKIT_ENTMAX = 2,
    ATTNKIT_GAUSSIAN = 3,
    ATTNKIT_LINEAR = 4,       /* sums over keys of features, in time linear in the number of tokens; masks are key masks */
    ATTNKIT_COSINE = 5,
    ATTNKIT_PERFORMER = 6,
    ATTNKIT_EFFICIENT = 7,
    ATTNKIT_SOFTPICK = 8,
    ATTNKIT_STICK_BREAKING = 9, /* causal: plan->highest says so; likewise */
    ATTNKIT_FORGETTING = 10,  /* softmax of scores that fade by ATTNKIT_LOG_FORGET */
    ATTNKIT_GATED_LINEAR = 11, /* a state that fades by ATTNKIT_LOG_GATE, causal: L = S, and masks are key masks; likewise */
    ATTNKIT_DELTA = 12        /* a state that corrects what it holds by the share ATTNKIT_BETA and fades by
                                 ATTNKIT_LOG_GATE, ATTNKIT_LOG_DECAY or not at all */
};

enum attnkit_pass { ATTNKIT_FORWARD = 0, ATTNKIT_BACKWARD = 1 };

enum attnkit_activation { /* a name never changes its number; attnkit_activation() has them by name */
    ATTNKIT_RELU = 0,
    ATTNKIT_RELU_SQUARED = 1,
    ATTNKIT_GELU = 2,
    ATTNKIT_GELU_TANH = 3,
    ATTNKIT_SOFTPLUS = 4,
    ATTNKIT_IDENTITY = 5,
    ATTNKIT_RELU6 = 6,
    ATTNKIT_SIGMOID = 7,
    ATTNKIT_SILU = 8,
    ATTNKIT_ACTIVATIONS = 9,  /* how many there are */
    ATTNKIT_NO_ACTIVATION = -1
};

enum attnkit_feature_map { /* of linear attention; then Performer's kernels */
    ATTNKIT_ELU_PLUS_ONE = 0,
    ATTNKIT_RELU_FEATURES = 1,
    ATTNKIT_IDENTITY_FEATURES = 2,
    ATTNKIT_SOFTMAX_KERNEL = 3,
    ATTNKIT_RELU_KERNEL = 4
};

enum attnkit_length { /* n of A4 */
    ATTNKIT_LENGTH_NUMBER = 0,  /* plan->length */
    ATTNKIT_LENGTH_VISIBLE = 1, /* the number of keys that the query sees */
    ATTNKIT_LENGTH_ARRAY = 2,   /* the array ATTNKIT_LENGTHS */
    ATTNKIT_LENGTH_ALL = 3      /* S, of the sequence where sequences are packed */
};

/* Arrays of a call. `features` below are those of q and k (d), `values` those of v (e). */
enum attnkit_array {
    /* inputs (..., tokens, features): float64, float32, bfloat16 or float16, one dtype for the three */
    ATTNKIT_Q,
    ATTNKIT_K,
    ATTNKIT_V,               /* absent: only statistics of rows are computed */
    /* options; stride 0 on the axes along which they broadcast */
    ATTNKIT_BIAS,            /* (..., L, S), any float dtype */
    ATTNKIT_MASK,            /* (..., L, S), bool, 1 = visible */
    ATTNKIT_KEY_LENGTHS,     /* (...), any integers */
    ATTNKIT_QUERY_MASK,      /* (..., L), bool */
    ATTNKIT_DROPOUT_MASK,    /* (..., L, S), any float dtype */
    ATTNKIT_SEED,            /* one integer of 64 or 32 bits: dropout by counter (A9) with probability plan->dropout */
    ATTNKIT_LENGTHS,         /* (..., L), any float dtype; see plan->length_kind */
    ATTNKIT_ALPHA,           /* (..., L), any float dtype: alpha of entmax by rows; else it is the number plan->alpha */
    ATTNKIT_SINK,            /* (...), any float dtype: of softmax by items; else it is the number plan->sink */
    ATTNKIT_PROJECTION,      /* of Performer: (..., projected, features), any float dtype */
    ATTNKIT_STATE,           /* of linear ops, the keys that came before, any float dtypes: S (..., f, values), */
    ATTNKIT_NORMALISER,      /* z (..., f), which only comes with S, */
    ATTNKIT_LEVEL,           /* and m (..., f) of efficient attention or c (..., 1) of Performer's softmax kernel */
    ATTNKIT_LOG_DECAY,       /* of linear attention, under causality alone: (..., S), any float dtype, or all have
                                plan->log_decay: by exp of which a key multiplies the sums before it; of the delta rule */
    ATTNKIT_LOG_FORGET,      /* of forgetting attention: (..., S), any float dtype, and with the items of q: exp of it is what a
                                token leaves of the weights of all before it. Read as 0 of tokens that are hidden by
                                ATTNKIT_KEY_LENGTHS or by a mask of tokens (plan->hides_tokens) */
    ATTNKIT_BETA,            /* of the delta rule: (..., S), any float dtype. Read as 0 of hidden tokens, like ATTNKIT_LOG_GATE */
    ATTNKIT_LOG_GATE,        /* (..., S, features), any float dtype: by exp of which a token multiplies features of the state
                                before it */
    /* packed sequences, one after the other along L and S: sequence b has the rows edges[b] .. edges[b + 1] and sees no
     * other. Both or none, (sequences + 1), int32 or int64. Of the other arrays, such calls have q, k, v, lengths, o, lse,
     * rows, their cotangents and dq, dk, dv. */
    ATTNKIT_EDGES_Q,
    ATTNKIT_EDGES_K,
    /* outputs of the forward pass; inputs of the backward pass as said there */
    ATTNKIT_O,               /* (..., L, values), dtype of q. Backward, softmax and softpick: o, or absent and it
                                is recomputed */
    ATTNKIT_LSE,             /* (..., L), compute dtype, softmax only; of stick-breaking the remainder */
    ATTNKIT_ROWS,            /* (..., L, ATTNKIT_ROW_NUMBERS), compute dtype: what the backward pass wants to know of
                                rows; NULL there and it is recomputed. Contents are private and valid for one plan. */
    ATTNKIT_TOTAL,           /* statistics of rows (C), (..., L), compute dtype; not written in the backward pass */
    ATTNKIT_ENTROPY,
    ATTNKIT_SUM_SQUARES,
    ATTNKIT_MAXIMUM,
    ATTNKIT_NONZERO,
    ATTNKIT_VISIBLE,
    ATTNKIT_FINAL_STATE,     /* the state after all keys, like ATTNKIT_STATE, in the compute dtype. Stride 0 on the axes
                                that it has not: those of q alone */
    ATTNKIT_FINAL_NORMALISER,
    ATTNKIT_FINAL_LEVEL,
    /* cotangents; an absent one is 0 */
    ATTNKIT_DO,              /* (..., L, values), any float dtype */
    ATTNKIT_DLSE,            /* (..., L), compute dtype, like the next four */
    ATTNKIT_DTOTAL,
    ATTNKIT_DENTROPY,
    ATTNKIT_DSUM_SQUARES,
    ATTNKIT_DMAXIMUM,
    ATTNKIT_DFINAL_STATE,    /* any float dtype, like the next two; strides as those of ATTNKIT_FINAL_STATE */
    ATTNKIT_DFINAL_NORMALISER,
    ATTNKIT_DFINAL_LEVEL,
    /* gradients, in any float dtype. Stride 0 on an axis adds up along it, so that each has the shape of its input */
    ATTNKIT_DQ,
    ATTNKIT_DK,
    ATTNKIT_DV,
    ATTNKIT_DBIAS,
    ATTNKIT_DALPHA,
    ATTNKIT_DSINK,
    ATTNKIT_DSTATE,
    ATTNKIT_DNORMALISER,
    ATTNKIT_DLEVEL,
    ATTNKIT_DLOG_DECAY,
    ATTNKIT_DLOG_FORGET,
    ATTNKIT_DBETA,
    ATTNKIT_DLOG_GATE,
    ATTNKIT_ARRAYS
};

/* Strides are in elements and may be 0 or negative. An array of rows has no `column`, key lengths have neither, and z, m
 * and c of a state and decays have no `row`. */
typedef struct {
    int32_t dtype;
    int32_t reserved;
    int64_t axes[ATTNKIT_AXES];
    int64_t row;
    int64_t column;
} attnkit_view;

typedef struct {
    uint32_t size;           /* sizeof(attnkit_plan) */
    uint32_t version;        /* ATTNKIT_VERSION */
    int32_t op;
    int32_t pass;
    int32_t activation;      /* pointwise only */
    int32_t length_kind;
    int32_t log_length;      /* 1: -log n is added to the scores (shift="-log_length") */
    int32_t exact_zeros;     /* 1: `nonzero` counts weights that are not 0, else it is `visible` (C) */
    int32_t feature_map;     /* linear and Performer only */
    int32_t normalize;       /* linear only: 1 divides by the sum of the row */
    int32_t hides_tokens;    /* forgetting only: 1 says that ATTNKIT_MASK has one row, which hides tokens from all queries */
    int32_t reserved;
    int64_t axes[ATTNKIT_AXES]; /* sizes of the leading axes of o; 1 for those that the call lacks */
    int64_t queries;         /* L */
    int64_t keys;            /* S */
    int64_t features;        /* d */
    int64_t values;          /* e */
    int64_t projected;       /* features that a projection makes of d */
    int64_t lowest;          /* the pair (i, j) is visible if lowest <= j - i <= highest: causality and windows; */
    int64_t highest;         /* INT64_MIN and INT64_MAX where nothing is hidden */
    int64_t key_length;      /* and j < key_length: S, or key_lengths as a number */
    int64_t sequences;       /* packed ones; a pair is also bounded by before <= (j - i) - (S - L) <= after, where L and S */
    int64_t before;          /* are those of its sequence and i and j are counted within it */
    int64_t after;
    int64_t heads[ATTNKIT_AXES]; /* counters of dropout: head = sum of index * heads[axis], likewise the item */
    int64_t items[ATTNKIT_AXES];
    double scale;
    double gain;             /* pointwise: w = gain * n^-alpha * h(s + shift) */
    double alpha;            /* of pointwise or entmax */
    double shift;
    double length;
    double dropout;          /* p, of dropout by counter */
    double eps;              /* of linear ops and softpick */
    double sink;             /* of softmax: w = exp(s) / (exp(sink) + sum of exp(s)); -INFINITY where there is none */
    double log_decay;        /* of linear attention; 0 where there is none */
    attnkit_view arrays[ATTNKIT_ARRAYS];
} attnkit_plan;

/* GOMP_parallel of an OpenMP runtime: run body(data) on `threads` threads, the caller's among them. */
typedef void (*attnkit_openmp)(void (*body)(void *), void *data, unsigned threads, unsigned flags);

/* Serve a call on up to `threads` threads: those of `openmp` or, where it is NULL, of this library. `pointers` are the first
 * elements (index 0 on every axis, also where strides are negative) of the `count` arrays in `places`, numbers of
 * `enum attnkit_array`: of all that the plan describes, and of no other, but NULL. An array without elements may be NULL.
 * With the environment variable ATTNKIT_POISON, working memory holds NaN before it is written. */
ATTNKIT_API int attnkit_run(const attnkit_plan *plan, const int64_t *places, int64_t count, void *const *pointers,
                            int threads, attnkit_openmp openmp);

/* Functions of CPython, with which calls from its main thread end early after a SIGINT: PyGILState_Ensure,
 * PyGILState_Release, PyOS_InterruptOccurred and PyErr_SetInterrupt. */
ATTNKIT_API void attnkit_listen(int (*ensure)(void), void (*release)(int), int (*occurred)(void), void (*set)(void));

/* What attnkit_run would refuse of this plan, without pointers: ATTNKIT_OK where it would serve the call. */
ATTNKIT_API int attnkit_check(const attnkit_plan *plan);

/* The number of an activation by its name, such as "relu"; ATTNKIT_NO_ACTIVATION if this library has no such kernel. */
ATTNKIT_API int attnkit_activation(const char *name);

/* What a code means, in English; never NULL. */
ATTNKIT_API const char *attnkit_message(int code);

/* The level that this library was compiled for: 1 (baseline), 3, 4 (x86-64-v3, v4), 5 (v4 with products of bfloat16 in
   vectors), 6 (in tiles, AMX: attnkit_machine_level of the detector asks the system for them, once in a process). */
ATTNKIT_API int attnkit_level(void);

#ifdef __cplusplus
}
#endif
#endif
