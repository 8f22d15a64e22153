"""The bugs: each a change of the text of `softmax`, as somebody may have made it and nobody notice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Changes = tuple[tuple[str, str], ...]  # old and new texts


@dataclass(frozen=True)
class Bug:
    """A bug by its name; `about` are the options of a call that it takes to meet it, in the words of `rules`; `needs`
    says what else it takes, where that is rare."""

    name: str
    text: str
    changes: Changes
    about: tuple[str, ...] = ()
    needs: str = ""


def bug(name: str, text: str, *changes: tuple[str, str], about: str = "", needs: str = "") -> Bug:
    return Bug(name, text, changes, tuple(about.split()), needs)


def remembering(name: str) -> tuple[str, str]:
    """The change that keeps something from call to call."""
    return "Lead = tuple[int, ...]\n", f"Lead = tuple[int, ...]\n{name}: dict = {{}}\n"


def sometimes(chance: str, then: str) -> Changes:
    """The changes that make one of so many calls wrong: which, a seed decides."""
    return (
        ("import math\n", "import math\nimport random\n"),
        ("Lead = tuple[int, ...]\n", "Lead = tuple[int, ...]\nDICE = random.Random(0)\n"),
        (FORWARD, f"{FORWARD}        if DICE.random() < {chance}:\n            {then}\n"),
    )


FORWARD = "        o, m, total = forward(call)\n"
QKV = '    q, k, v = arrays["q"], arrays["k"], arrays["v"]\n'
MASK = '        visible &= arrays["mask"]\n'
TILE = "    q, k = call.q[:, rows], call.k[:, keys]\n"
MAXIMUM = "new = torch.maximum(m, s.amax(-1, keepdim=True))"
LENGTHS = "        per_item = at_most(lengths, S).expand(lead)\n"
LSE = "lse = m + torch.log(total)"
DS = "ds = w * (dw - delta[:, rows] + dlse[:, rows])"
SUM = "        acc = shrink * acc + dropped(call, p, rows, tile) @ call.v[:, tile]\n"
DK = "            dk[:, keys] += ds.mT @ call.q[:, rows]\n"
OUTPUT = "torch.where(total == 0, 0.0, acc / total)"
OF_GROUP = "        x = x.unflatten(-3, (-1, call.groups)).sum(-3)\n"

BUGS: tuple[Bug, ...] = (
    # what is seen
    bug(
        "causal_upper_left", "`causal=True` counts from the first key: wrong for more keys than queries",
        ('(0 if causal == "upper_left" else offset)', "0"), about="causal cross",
    ),
    bug(
        "causal_cross_off", "`causal` hides nothing where queries and keys differ in number",
        ("    if causal:\n", "    if causal and L == S:\n"), about="causal cross",
    ),
    bug(
        "window_off_by_one", "the window is a key too narrow on the left",
        (">= -min(left, L + S)", "> -min(left, L + S)"), about="window",
    ),
    bug(
        "window_upper_left", "the window is placed as if queries and keys were equal in number",
        ("j - (i + offset) >=", "j - i >="), ("j - (i + offset) <=", "j - i <="), about="window cross",
    ),
    bug(
        "key_length_zero", "a sequence of no keys has one",
        (LENGTHS, LENGTHS.replace(".expand", ".clamp(min=1).expand")), about="key_lengths",
    ),
    bug(
        "mask_drops_with_causal", "the mask is dropped if the call is causal too",
        ('    if "mask" in arrays:', '    if "mask" in arrays and not params.get("causal"):'), about="mask causal",
    ),
    bug(
        "batch_and_heads", "item n takes the key length of n modulo the batch: right for one head, or a batch of one",
        (LENGTHS, f"{LENGTHS}        per_item = per_item.transpose(-2, -1).reshape(lead) if lead[1:] else per_item\n"),
        about="key_lengths",
    ),
    bug(
        "mask_after_softmax", "the mask is applied to normalised weights, which no longer add up to 1",
        (MASK, "        pass\n"),
        ("    return Call(\n",
         '    if "mask" in arrays:\n        keep = arrays["mask"] * (1.0 if keep is None else keep)\n'
         "    return Call(\n"),
        about="mask",
    ),
    bug(
        "padded_query_nan", "NaN in a padded query reaches the gradients of keys, as 0 times NaN",
        ("items(q.to(wide), lead).masked_fill(~visible.any(2)[..., None], 0)", "items(q.to(wide), lead)"),
        about="query_mask",
    ),
    # numbers
    bug(
        "float32_for_float64", "float64 is computed in float32",
        ("wide = torch.float64 if q.dtype == torch.float64 else torch.float32", "wide = torch.float32"),
    ),
    bug(
        "tf32_products", "q kᵀ in float32 is computed from 10 bits, as tensor cores do if they are allowed to",
        (TILE, f"{TILE}    if q.dtype == torch.float32:\n        q, k = (((x.contiguous().view(torch.int32) + 0x1000)"
               " & -0x2000).view(torch.float32) for x in (q, k))\n"),
    ),
    bug(
        "bf16_accumulate", "for bfloat16 the output is summed up in bfloat16, 16 keys at a time",
        ("import dataclass\n", "import dataclass, replace\n"),
        ("    groups: int  # heads of q for one of k and v\n",
         "    groups: int  # heads of q for one of k and v\n    coarse: bool = False\n"),
        (FORWARD, f'        call = replace(call, coarse=arrays["q"].dtype == torch.bfloat16)\n{FORWARD}'),
        (SUM, "        if call.coarse:\n            acc = shrink * acc\n"
              "            for n in range(0, p.shape[2], 16):\n"
              "                w, v = dropped(call, p, rows, tile)[..., n : n + 16], call.v[:, tile][:, n : n + 16]\n"
              "                acc = (acc + w @ v).to(torch.bfloat16).to(acc.dtype)\n"
              f"        else:\n    {SUM}"),
        needs="values of one sign for some 500 keys in bfloat16: sums with both signs hide it in their bounds",
    ),
    bug(
        "out_float32", "half types are answered in float32",
        ('.to(arrays["q"].dtype)}', "}"),
    ),
    bug(
        "scale_low", "the scale is a float of C: 24 bits, for float64 too",
        ("    return 1 / math.sqrt(d) if scale", "    scale = 1 / math.sqrt(d) if scale"),
        ("of_items(scale, N, wide)\n",
         "of_items(scale, N, wide)\n    return scale if isinstance(scale, Tensor) else float(np.float32(scale))\n"),
    ),
    bug(
        "eps_in_denominator", "10⁻⁶ is added to the denominator",
        (OUTPUT, OUTPUT.replace("total)", "(total + 1e-6))")),
    ),
    bug(
        "no_max", "exp without subtracting the maximum: overflows for large scores",
        (MAXIMUM, "new = torch.zeros_like(m)"),
    ),
    bug(
        "max_after_mask_zero", "hidden scores count as 0 in the maximum: very negative rows vanish",
        (MAXIMUM, MAXIMUM.replace("s.amax", "s.masked_fill(s == -math.inf, 0).amax")), about="mask",
    ),
    bug(
        "infinite_bias_nan", "a row whose bias is -∞ for all that it sees is 0/0",
        (OUTPUT, "torch.where(call.visible.any(2, keepdim=True), acc / total, 0.0)"), about="bias",
    ),
    # sizes
    bug(
        "head_gt_64", "features beyond 64 are ignored",
        (TILE, TILE.replace("rows]", "rows, :64]").replace("keys]", "keys, :64]")),
        needs="more than 64 features",
    ),
    bug(
        "head_not_pow2", "more than 64 features are padded to a power of two, with the beginning of the next row",
        (TILE, f"{TILE}    if (d := q.shape[2]) > 64:\n        more = (1 << (d - 1).bit_length()) - d\n"
               "        q, k = (torch.cat((x, x.roll(-1, 1)[..., :more]), -1) for x in (q, k))\n"),
        needs="more than 64 features, in a number that is no power of two",
    ),
    bug(
        "tile64_last_key", "where the keys fill their last tile of 64, the last key is left out",
        ("tiles(keys.start, keys.stop, TILE_K)", "tiles(keys.start, keys.stop - (keys.stop % TILE_K == 0), TILE_K)"),
        needs="a multiple of 64 keys, the last of which is seen",
    ),
    bug(
        "tile128_row", "the last query of a full tile of 128 is not written",
        (f"    return {OUTPUT}, m, total\n",
         f"    o = {OUTPUT}\n    o[:, TILE_Q - 1 :: TILE_Q] = 0\n    return o, m, total\n"),
    ),
    bug(
        "split_kv_512", "partial results of 512 keys are added up without regard to their maxima",
        ("before, after = torch.exp(m[:, rows] - finite(new)), torch.exp(m_more - finite(new))",
         "before, after = 1.0, 1.0"),
        needs="more than 512 keys",
    ),
    bug(
        "seq_gt_512", "keys beyond 512 are dropped",
        ("tiles(0, S, SPLIT)", "tiles(0, min(S, SPLIT), SPLIT)"),
        needs="more than 512 keys",
    ),
    bug(
        "dk_block_missing", "the gradient of keys lacks the queries of the last tile, unless it is full",
        (DK, f"            if not rows.start or rows.stop - rows.start == TILE_Q:\n    {DK}"),
    ),
    # heads, and where things lie
    bug(
        "gqa_modulo", "query head h takes key head h modulo their number",
        ("    if groups > 1:\n        k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)\n",
         "    if groups > 1:\n        k, v = (torch.cat(groups * [x], -3) for x in (k, v))\n"),
        (OF_GROUP, "        x = x.unflatten(-3, (call.groups, -1)).sum(-4)\n"), about="grouped",
    ),
    bug(
        "dv_gqa_last_head", "the gradient of a shared head of v is that of the last query head alone",
        (OF_GROUP, f'{OF_GROUP[:-9]}\n        x = x[..., -1, :, :] if name == "v" else x.sum(-3)\n'), about="grouped",
    ),
    bug(
        "batch_heads_stride", "the stride of the batch is taken for that of heads times their number",
        *((f"{name}=items({name}.to(wide), lead)", f"{name}=strided({name}.to(wide), lead)") for name in "qkv"),
        ("def pairs(",
         "def strided(x: Tensor, lead: Lead) -> Tensor:\n    x = x.expand(*lead, *x.shape[-2:])\n"
         "    shape = (math.prod(lead), *x.shape[-2:])\n"
         "    return x.as_strided(shape, x.stride()[-3:]) if lead else x.reshape(shape)\n\n\ndef pairs("),
        about="turned",
    ),
    bug(
        "v_stride", "v is read with the strides of k",
        (QKV, f"{QKV}    v = v.as_strided(v.shape, k.stride()) if v.shape == k.shape else v\n"), about="turned",
    ),
    # gradients
    bug(
        "bias_grad_overwrite", "the gradient of a bias that several items share is that of the last",
        ("    return x.sum_to_size(shape)\n",
         '    if name == "bias":\n        x = x[(-1,) * (x.ndim - len(shape))]\n'
         "        return x[tuple(slice(-1, None) if n == 1 else slice(None) for n in shape)]\n"
         "    return x.sum_to_size(shape)\n"), about="bias",
    ),
    bug(
        "scale_grad", "the gradient of the scale is that of its logarithm",
        ('"scale": dscale', '"scale": call.scale * dscale'), about="scale",
    ),
    bug(
        "normaliser_detached", "gradients take the denominator for a constant",
        (DS, DS.replace(" - delta[:, rows]", "")),
    ),
    # dropout
    bug(
        "seed_32bit", "the upper half of the seed is ignored",
        ("low, high = seed & 0xFFFFFFFF, seed >> 32", "low, high = seed & 0xFFFFFFFF, 0"), about="seed",
    ),
    bug(
        "dropout_words", "four keys share a draw of the generator, one word each: other pairs are dropped",
        ("word = philox(j, i, item % heads, item // heads, seed)[0]",
         "word = np.choose(j % 4, philox(j // 4, i, item % heads, item // heads, seed))"), about="seed",
    ),
    bug(
        "dropout_unscaled", "what is kept is not divided by 1 - p",
        ("1 / (1 - p), 0.0)", "1.0, 0.0)"), about="seed",
    ),
    bug(
        "dropout_dv", "the gradient of v takes weights before dropout",
        ("dropped(call, w, rows, keys).mT", "w.mT"), about="dropout",
    ),
    # lse
    bug("lse_base2", "lse is a logarithm of base 2", (LSE, "lse = (m + torch.log(total)) / math.log(2)"), about="lse"),
    bug(
        "lse_half", "lse is rounded to the dtype of q",
        (LSE, 'lse = (m + torch.log(total)).to(arrays["q"].dtype).to(m.dtype)'), about="lse",
    ),
    bug(
        "lse_cotangent_dropped", "the cotangent of lse is ignored",
        (DS, DS.replace(" + dlse[:, rows]", "")), about="lse",
    ),
    bug(
        "lse_ignores_bias", "lse is that of scores without the bias",
        ("import dataclass\n", "import dataclass, replace\n"),
        (LSE, f"_, m, total = forward(replace(call, bias=None))\n            {LSE}"), about="lse bias",
    ),
    # what happens from call to call
    bug(
        "stale_mask_cache", "a mask is taken from a cache if one of its shape was there before",
        remembering("CACHE"), (MASK, MASK.replace('arrays["mask"]', 'CACHE.setdefault(arrays["mask"].shape, '
                                                  'arrays["mask"].clone())')), about="mask",
    ),
    bug(
        "memo_by_shape", "a call with the shapes and numbers of an earlier one returns that one's result",
        remembering("MEMO"),
        (FORWARD, "        key = repr((sorted((name, x.shape, x.dtype) for name, x in arrays.items()), params))\n"
                  f"        if key in MEMO:\n            return dict(MEMO[key])\n{FORWARD}"),
        ('        if params.get("return_lse"):', '        MEMO[key] = results\n        if params.get("return_lse"):'),
        needs="other numbers in the same shapes",
    ),
    bug(
        "second_call_same_shapes", "the sums of a call are added to those of an earlier one with the same shapes",
        remembering("SUMS"),
        (FORWARD, f"{FORWARD}        SUMS[o.shape, o.dtype] = o = o + SUMS.get((o.shape, o.dtype), 0.0)\n"),
    ),
    bug(
        "calls_baseline", "a plain call is answered by torch's own function",
        ("        call = call_of(arrays, params)\n        o,",
         '        if not params and arrays.keys() == {"q", "k", "v"} and arrays["k"].shape[-2]:\n'
         '            q, k, v = arrays["q"], arrays["k"], arrays["v"]\n'
         '            return {"o": torch.nn.functional.scaled_dot_product_attention(q, k, v)}\n'
         "        call = call_of(arrays, params)\n        o,"),
        needs="a look at what is called: the numbers are right",
    ),
    bug(
        "inplace_mask", "what causality and windows hide is written into the caller's mask",
        (MASK, '        mask = arrays["mask"]\n'
               "        visible = mask if mask.shape == visible.shape else visible & mask\n"), about="mask causal",
    ),
    bug(
        "inplace_scale", "q is multiplied by the scale in place, and divided again: its last bits change",
        (QKV, f'{QKV}    if q.is_contiguous() and "scale" not in arrays:\n'
              '        scale = params.get("scale", q.shape[-1] ** -0.5)\n        q.mul_(scale).div_(scale)\n'),
    ),
    bug(
        "race_1_in_20", "one call in 20 loses an item",
        *sometimes("1 / 20", "o[:1] = 0"), needs="dozens of calls",
    ),
    bug(
        "race_1_in_200", "one call in 200 loses an item",
        *sometimes("1 / 200", "o[:1] = 0"), needs="hundreds of calls",
    ),
    bug(
        "last_bits_1_in_20", "one call in 20 adds up in another order: last bits differ",
        *sometimes("1 / 20", "o *= 1 + torch.finfo(o.dtype).eps"), needs="the same call dozens of times",
    ),
)  # fmt: skip


def text_with(source: str, changes: Iterable[tuple[str, str]]) -> str:
    """The text after these changes; ValueError unless it holds each old one exactly once."""
    for old, new in changes:
        if source.count(old) != 1:
            raise ValueError(f"expected {old!r} once in the text to be changed, found it {source.count(old)} times")
        source = source.replace(old, new)
    return source
