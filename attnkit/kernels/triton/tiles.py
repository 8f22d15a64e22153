"""Shared by kernels on tiles of an (L, S) array of pairs: addresses, visibility, dropout, products.

Branches are decided at compile time and functions return once, because Triton also compiles the code after a return. A
*view* is a tuple (pointer, stride of items, of heads, of rows, of columns). Indices within a tile, `i` of queries and
`j` of keys, are passed as (M, 1) and (1, N) for standing tiles or as (1, M) and (N, 1) for lying ones.

Absent options are None, and nothing is compiled for them. What Triton 3.6 cannot do is avoided: functions return no
None, but numbers that have no effect or an empty tuple; whether a tuple is None is asked only if it holds none itself;
and of a tuple of tuples a kernel makes a new one, `pairs[:]`, since the types of its arguments lack inner constants.
"""

import triton
import triton.language as tl


@triton.jit
def place(blocks, heads, IN_TURN: tl.constexpr = False):
    """Block, head and item of this program; neighbouring programs share a head, or IN_TURN a block."""
    n = tl.program_id(0)
    if IN_TURN:
        shared = tl.num_programs(0) // blocks
        block, n = n // shared, n % shared
    else:
        block, n = n % blocks, n // blocks
    return block, (n % heads).to(tl.int64), (n // heads).to(tl.int64)


@triton.jit
def first_block(edges, sequence, size):
    """The first block of a packed sequence."""
    return tl.load(edges + sequence).to(tl.int32) // size + sequence


@triton.jit
def own_tokens(edges, sequence):
    """The first token and the length of a packed sequence."""
    first = tl.load(edges + sequence).to(tl.int64)
    return first, (tl.load(edges + sequence + 1) - first).to(tl.int32)


@triton.jit
def own_sequence(edges, sequences, block, size):
    """The packed sequence that a block of tokens belongs to, and the first of its blocks.

    The blocks of sequence b start at edges[b]//size + b; there are as many as it needs, sometimes one more.
    """
    low, high = 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        starts_before = first_block(edges, middle, size) <= block
        low, high = tl.where(starts_before, middle, low), tl.where(starts_before, high, middle)
    return low, first_block(edges, low, size)


@triton.jit
def placed(limits, tokens, heads, SIZE: tl.constexpr, BY_KEYS: tl.constexpr, IN_TURN: tl.constexpr = False):
    """Block of the `tokens`, queries or keys, head, item, item of keys, and how many queries and keys this program has.

    The item of a packed sequence is its first token: the item stride of its views is that of tokens.
    """
    queries, keys = limits[0], limits[1]
    blocks = tl.cdiv(tokens, SIZE)
    if limits[4] is None:
        block, head, item = place(blocks, heads, IN_TURN)
        key_item = item
    else:
        block, head, _item = place(blocks + limits[6], heads, IN_TURN)
        sequence, first = own_sequence(limits[5] if BY_KEYS else limits[4], limits[6], block, SIZE)
        block -= first
        item, queries = own_tokens(limits[4], sequence)
        key_item, keys = own_tokens(limits[5], sequence)
    return block, head, item, key_item, queries, keys


@triton.jit
def left_of(limits, queries, keys):
    """The bound `left` of a program; that of a packed sequence counts from its last tokens."""
    return limits[2] if limits[4] is None else limits[2] - (keys - queries)


@triton.jit
def right_of(limits, queries, keys):
    """The bound `right` of a program; packed sequences may have a second one that counts from their last tokens."""
    return limits[3] if limits[7] is None else tl.minimum(limits[3], keys - queries + limits[7])


@triton.jit
def corner(view, item, head, row, column):
    """The address of one element."""
    start = view[0] + item * view[1] + head * view[2]
    return start + tl.cast(row, tl.int64) * view[3] + tl.cast(column, tl.int64) * view[4]


@triton.jit
def load_rows(view, item, head, first, rows, keep, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows first + rows of a (tokens, WIDTH) matrix, (len(rows), PADDED); 0 where `keep` is False and beyond WIDTH."""
    columns = tl.arange(0, PADDED)
    at = corner(view, item, head, first, 0) + rows[:, None] * view[3] + columns[None, :] * view[4]
    if keep is not None:
        x = tl.load(at, mask=keep[:, None] & (columns < WIDTH)[None, :], other=0.0)
    elif WIDTH == PADDED:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=(columns < WIDTH)[None, :], other=0.0)
    return x


@triton.jit
def store_rows(view, item, head, first, rows, keep, x, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The inverse of `load_rows`, rounded to the dtype of the view."""
    columns = tl.arange(0, PADDED)
    at = corner(view, item, head, first, 0) + rows[:, None] * view[3] + columns[None, :] * view[4]
    tl.store(at, x.to(view[0].dtype.element_ty), mask=keep[:, None] & (columns < WIDTH)[None, :])


# Programs that add to the same rows take turns. Those of one head do so in the order of their blocks of keys, which is
# the order in which they start: whoever waits has its predecessor running or done. Each says in `turns`, 0 at first,
# how many rows it is done with, and waits for the one before it alone. From block to block the rows that see it begin
# and end later, so that rows passed over at the beginning are no later block's, and those at the end no earlier one's.


@triton.jit
def turn_of(turns, block, blocks):
    """Where a program placed IN_TURN says how far it is, where the one before it does, and whether there is one."""
    own = turns + tl.program_id(0)
    return own, own - tl.where(block > 0, tl.num_programs(0) // blocks, 0), tl.where(block > 0, 1, 0)


@triton.jit
def wait_for_turn(turn, done):
    """Until the program before this one is done with so many rows."""
    done *= turn[2]
    reached = tl.atomic_add(turn[1], 0, sem="acquire")
    while reached < done:
        reached = tl.atomic_add(turn[1], 0, sem="acquire")


@triton.jit
def end_turn(turn, done):
    """Say that so many rows are done with, after the stores of all threads."""
    tl.debug_barrier()
    tl.atomic_xchg(turn[0], done, sem="release")


@triton.jit
def add_rows(view, item, head, first, rows, keep, x, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Add x to rows in float32, as other programs do before and after: past the cache of the multiprocessor."""
    columns = tl.arange(0, PADDED)
    at = corner(view, item, head, first, 0) + rows[:, None] * view[3] + columns[None, :] * view[4]
    keep = keep[:, None] & (columns < WIDTH)[None, :]
    x += tl.load(at, mask=keep, other=0.0, cache_modifier=".cg")
    tl.store(at, x, mask=keep, cache_modifier=".cg")


@triton.jit
def load_pairs(view, item, head, i0, i, j0, j, inside):
    """A tile of an array of pairs, 0 where `inside` is False."""
    at = corner(view, item, head, i0, j0) + i * view[3] + j * view[4]
    return tl.load(at, mask=inside, other=0)


@triton.jit
def valid_keys(key_lengths, keys, item, head):
    """The number of keys of an item: `keys`, or fewer by its key_lengths."""
    if key_lengths is not None:
        length = tl.load(key_lengths[0] + item * key_lengths[1] + head * key_lengths[2])
        keys = tl.minimum(tl.maximum(length.to(tl.int64), 0), keys).to(tl.int32)
    return keys


@triton.jit
def key_ends(rows, queries, keys, right, query_mask, item, head):
    """hi for the queries `rows`: by causality, window, key_lengths and query_mask they see no key from hi on.

    They see the keys i - left ≤ j ≤ i + right below `keys`; left or right is None if the window is open.
    """
    hi = rows * 0 + keys
    if right is not None:
        hi = tl.minimum(hi, rows + (right + 1))
    live = rows < queries
    if query_mask is not None:
        live = live & (load_of_rows(query_mask, item, head, rows, queries, 0) != 0)
    return tl.where(live, hi, 0)


@triton.jit
def key_starts(rows, left):
    """lo for the queries `rows`: they see no key before lo."""
    return rows * 0 if left is None else tl.maximum(rows - left, 0)


@triton.jit
def visible_pairs(mask, left, hi, item, head, i0, i, j0, j):
    """visible(i, j) in a tile, from the window, the `key_ends` of its queries, and the boolean mask."""
    seen = j0 + j < hi
    if left is not None:
        seen = seen & (j0 + j >= i0 + i - left)
    if mask is not None:
        seen = load_pairs(mask, item, head, i0, i, j0, j, seen) != 0
    return seen


@triton.jit
def masked_pairs(mask, hi, item, head, i0, i, j0, j):
    """The same in a tile between the edges, where a query sees all keys or none but for the boolean mask: whole rows of
    it are read, several pairs at a time."""
    seen = tl.broadcast_to(j0 < hi, (i + j).shape)
    if mask is not None:
        seen = load_pairs(mask, item, head, i0, i, j0, j, seen) != 0
    return seen


@triton.jit
def spreads(sums):
    """Whether NaN is in sums of tiles from which tokens that nobody sees were not taken: 0 times what padding may hold.

    To ask a tile which of its tokens are seen costs as much as the rest of it, so that it is asked only after that. One
    maximum, not two: of two Triton 3.6 fails to compile for compute capability 10.
    """
    total = sums[0]
    return tl.max((total != total).to(tl.int32)) > 0


@triton.jit
def keys_of_a_tile(inside, at, low, stop, MASKED: tl.constexpr):
    """A mask of the keys `at` that some query of a standing tile sees: `low` to `stop` unless there are masks."""
    if MASKED:
        seen = tl.max(inside.to(tl.int32), 0) > 0
    elif low is None:
        seen = at < stop
    else:
        seen = (at >= low) & (at < stop)
    return seen


@triton.jit
def queries_of_a_tile(inside, rows, left, hi, j0, KEYS: tl.constexpr, MASKED: tl.constexpr):
    """A mask of the queries `rows` of a lying tile that see some of its keys."""
    if MASKED:
        seen = tl.max(inside.to(tl.int32), 0) > 0
    elif left is None:
        seen = hi > j0
    else:
        seen = tl.minimum(hi, j0 + KEYS) > tl.maximum(rows - left, j0)
    return seen


@triton.jit
def load_of_rows(view, item, head, rows, queries, other):
    """Values of the queries `rows` from a view without columns."""
    at = view[0] + item * view[1] + head * view[2] + tl.cast(rows, tl.int64) * view[3]
    return tl.load(at, mask=rows < queries, other=other)


@triton.jit
def store_of_rows(view, item, head, rows, queries, x):
    """The inverse of `load_of_rows`."""
    tl.store(view[0] + item * view[1] + head * view[2] + tl.cast(rows, tl.int64) * view[3], x, mask=rows < queries)


@triton.jit
def range_lengths(rows, left, hi):
    """n_i of the queries `rows` from their ranges of keys; 1 if a query sees nothing."""
    n = (hi if left is None else hi - key_starts(rows, left)).to(tl.float32)
    return tl.where(n > 0.0, n, 1.0)


@triton.jit
def after_dropout(x, dropout_mask, seed, last_kept, item, head, i0, i, j0, j, inside):
    """x ⊙ dropout_mask, or x with 0 on the pairs that the counter drops; 1/(1-p) is left to the caller.

    A pair is kept if the first word of Philox4x32-10 with key `seed` and counter (j, i, head, item) is ≤ `last_kept`.
    """
    if dropout_mask is not None:
        x = x * load_pairs(dropout_mask, item, head, i0, i, j0, j, inside).to(tl.float32)
    if seed is not None:
        zero = (i0 + i) * 0 + (j0 + j) * 0
        at = (zero + (j0 + j), zero + (i0 + i), zero + tl.cast(head, tl.int32), zero + tl.cast(item, tl.int32))
        word, _, _, _ = tl.philox(tl.load(seed), at[0], at[1], at[2], at[3])
        x = tl.where(word <= tl.cast(last_kept, tl.uint32), x, 0.0)
    return x


@triton.jit
def nothing(ROWS: tl.constexpr, COLUMNS: tl.constexpr, BESIDE: tl.constexpr):
    """The initial sums of `add_product`: a matrix, for each row the power of two that scales it, and with BESIDE the
    sum of the factors of y."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    size = tl.full((ROWS,), 0x00800000, tl.int32).to(tl.float32, bitcast=True)
    return (total, size, tl.zeros((ROWS,), tl.float32)) if BESIDE else (total, size)


@triton.jit
def add_product(sums, x, y, PRECISION: tl.constexpr):
    """sums + x y in float32, x being rounded to the dtype of y.

    float16 has little range: there each row of x is first divided by a power of two just below the largest element of
    the row so far, and the sums with it.
    """
    total, size = sums[0], sums[1]
    BESIDE: tl.constexpr = len(sums) == 3
    if BESIDE:
        beside = sums[2]
    if y.dtype == tl.float16:
        bits = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) & 0x7F800000
        bits = tl.maximum(tl.minimum(bits, 0x7E800000), size.to(tl.int32, bitcast=True))
        inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
        rounded = (x * inverse[:, None]).to(y.dtype)
        total = tl.dot(rounded, y, total * (size * inverse)[:, None])
        if BESIDE:
            beside *= size * inverse
        size = bits.to(tl.float32, bitcast=True)
    else:
        rounded = x.to(y.dtype)
        total = tl.dot(rounded, y, total, input_precision=PRECISION)
    if BESIDE:
        beside += tl.sum(rounded.to(tl.float32), 1)
    return (total, size, beside) if BESIDE else (total, size)


@triton.jit
def whole_sum(sums, own, dtype):
    """The sum of products with matrices of `dtype`; with a sum of factors, x (y - own) instead of x y."""
    total = sums[0]
    if len(sums) == 3:
        total -= tl.where(sums[2][:, None] == 0.0, 0.0, sums[2][:, None] * own.to(tl.float32))
    return total * sums[1][:, None] if dtype == tl.float16 else total


@triton.jit
def key_blocks(i0, queries, keys, left, right, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """first, whole, end, stop: of the keys visible to the queries i0 .. i0 + ROWS - 1, the blocks from `first` and
    from `end` are partially visible, those from `whole` to `end` entirely."""
    first, whole, end, stop = 0, 0, keys, keys
    last = tl.minimum(i0 + ROWS, queries) - 1
    if left is not None:
        first = tl.maximum(i0 - left, 0) // KEYS * KEYS
        whole = tl.cdiv(tl.maximum(last - left, 0), KEYS) * KEYS
    if right is not None:
        stop = tl.minimum(keys, last + right + 1)
        end = tl.maximum(tl.minimum(keys, i0 + right + 1), 0)
    return first, whole, tl.maximum(end // KEYS * KEYS, whole), stop


@triton.jit
def numbered(blocks, KEYS: tl.constexpr, MASKED: tl.constexpr):
    """The blocks of `key_blocks` as two sequences, of whole ones and of others: the first key, how many blocks, and
    after how many and how far on the sequence goes on elsewhere. If MASKED, all blocks are among the others."""
    first, whole, end, stop = blocks
    if MASKED:
        whole, end = stop, stop
    before = tl.maximum(tl.cdiv(tl.minimum(whole, stop) - first, KEYS), 0)
    after = tl.maximum(tl.cdiv(stop - end, KEYS), 0)
    inner = tl.maximum((end - whole) // KEYS, 0)
    return (whole, inner, inner, 0), (first, before + after, before, end - first - before * KEYS)


@triton.jit
def first_key(n, sequence, KEYS: tl.constexpr):
    """The first key of a block of `numbered`."""
    return sequence[0] + n * KEYS + tl.where(n < sequence[2], 0, sequence[3])


@triton.jit
def apart(x):
    """A tile (ROWS, KEYS) as (ROWS, KEYS/8, 4, 2): axis 2 says which thread has a number of a product."""
    return tl.reshape(x, (x.shape[0], x.shape[1] // 8, 4, 2))


@triton.jit
def sums_of(x):
    """Sums over keys (ROWS, 4)."""
    return tl.sum(tl.sum(apart(x), 3), 1)


@triton.jit
def maxima_of(x):
    """Maxima over keys (ROWS, 4)."""
    return tl.max(tl.max(apart(x), 3), 1)


@triton.jit
def query_blocks(j0, queries, keys, left, right, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """The same for the queries that may see the keys j0 .. j0 + KEYS - 1.

    Blocks of fewer than ROWS queries count as partially visible, and so do all with fewer than KEYS keys.
    """
    first, whole, end, stop = 0, 0, queries, queries
    if right is not None:
        first = tl.maximum(j0 - right, 0) // ROWS * ROWS
        whole = tl.cdiv(tl.maximum(j0 + KEYS - 1 - right, 0), ROWS) * ROWS
    if left is not None:
        stop = tl.minimum(queries, tl.minimum(j0 + KEYS, keys) + left)
        end = tl.minimum(queries, j0 + left + 1)
    stop = tl.where(j0 < keys, stop, 0)
    end = tl.where(j0 + KEYS <= keys, tl.minimum(end, stop), 0)
    return first, whole, tl.maximum(end // ROWS * ROWS, whole), stop
