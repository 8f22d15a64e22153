"""scaled_dot_product_attention beside torch's own and the reference, and in models of torch and transformers."""

import asyncio
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import trace_rules
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint

import attnkit
import attnkit_reference as reference
from attnkit.backends.torch.softmax import LEAST_KEYS
from attnkit.integrations.torch import MultiheadAttention, replace_sdpa, scaled_dot_product_attention, sdpa, set_sdpa
from attnkit_conformance.model import tolerance
from tests.integrations.counting import count
from tests.integrations.test_transformers import llama
from tests.library.arrays import LAYER, assert_agrees, assert_close

TORCHS, MULTI_HEAD = functional.scaled_dot_product_attention, functional.multi_head_attention_forward
L, S, HEADS, D = 4, 6, 4, 8
GENERATOR = torch.Generator().manual_seed(0)
MASK = (torch.rand(2, 1, L, S, generator=GENERATOR) < 0.6).index_fill_(3, torch.tensor([0]), True)
HIDING = torch.zeros(2, 1, L, S, dtype=torch.float64).masked_fill_(~MASK, -torch.inf)
ADDED = torch.randn(2, HEADS, L, S, dtype=torch.float64, generator=GENERATOR)

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def qkv(*leading: int, heads: int = HEADS, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shared = (*leading[:-1], heads) if leading else ()
    shapes = ((*leading, L, D), (*shared, S, D), (*shared, S, 5))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


def relu(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """The reference."""
    given = {name: x.numpy() if isinstance(x, Tensor) else x for name, x in options.items()}
    return torch.from_numpy(reference.pointwise_attention(*(x.detach().numpy() for x in (q, k, v)), **given))


# ------------------------------------------------------------------------------------- the function


@pytest.mark.parametrize("leading", [(), (HEADS,), (2, HEADS), (1, 2, HEADS)], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
def test_softmax_is_torchs(leading, options):
    assert_close(scaled_dot_product_attention(*qkv(*leading), **options), TORCHS(*qkv(*leading), **options))


def test_torchs_kernel_is_not_looped_over():
    q, k, v = torch.randn(3, 2, 1, HEADS, LEAST_KEYS, D)
    with pytest.raises(NotImplementedError, match="vmap is served by the generic implementation"):
        torch.func.vmap(lambda *x: attnkit.softmax_attention(*x, impl="sdpa"))(q, k, v)


@pytest.mark.parametrize(
    "mask",
    [
        MASK,
        HIDING,
        ADDED,
        ADDED + HIDING,
        ADDED[:1, :1].float().double(),
        torch.zeros(S, dtype=torch.bool).expand(L, S),
    ],
    ids=["selects", "hides", "adds", "adds and hides", "broadcasts", "hides all"],
)
def test_masks_are_torchs(mask):
    """Outputs and gradients, that of a mask that adds too; a row that sees nothing is 0."""
    found = []
    for function in (scaled_dot_product_attention, TORCHS):
        arrays = [x.requires_grad_() for x in (*qkv(2, HEADS), mask.clone()) if x.is_floating_point()]
        q, k, v = arrays[:3]
        out = function(q, k, v, arrays[3] if len(arrays) > 3 else mask)
        grads = torch.autograd.grad(out.sin().sum(), arrays)
        found.append([out, *grads[:3], *(torch.where(mask.isfinite(), g, 0.0) for g in grads[3:])])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs, 4.0)


def test_heads_are_grouped_as_in_torch():
    q, k, v = qkv(2, HEADS, heads=2)
    ours = scaled_dot_product_attention(q, k, v, MASK, enable_gqa=True)
    assert_close(ours, TORCHS(q, k, v, MASK, enable_gqa=True))
    with pytest.raises(ValueError, match="pass enable_gqa=True"):
        scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("bias", [causal_upper_left(L, S), causal_lower_right(L, S)], ids=["upper left", "lower right"])
def test_causal_biases_are_what_they_say(bias):
    assert_close(scaled_dot_product_attention(*qkv(2, HEADS), bias), TORCHS(*qkv(2, HEADS), bias))


def test_autocast_is_torchs():
    q, k, v = qkv(2, HEADS, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for given in ((q, k.bfloat16(), v), (q, k, v, ADDED.float())):
            ours, theirs = scaled_dot_product_attention(*given), TORCHS(*given)
            assert ours.dtype == theirs.dtype == torch.bfloat16
            bias = float(ADDED.abs().max()) if len(given) > 3 else 0.0
            size = float((q @ k.mT).abs().max()) / D**0.5 + bias
            assert_agrees(ours.float(), theirs.float(), tolerance.growth_of_exponent(size), v.abs().max(), "bfloat16")
        assert scaled_dot_product_attention(*qkv(2, HEADS)).dtype == torch.float64


@pytest.mark.parametrize(
    ("mask", "golden"),
    [
        (MASK, {"mask": MASK}),
        (HIDING, {"mask": MASK}),
        (HIDING.masked_fill(~MASK, torch.finfo(torch.float64).min), {"mask": MASK}),
        (ADDED + HIDING, {"mask": MASK, "bias": ADDED}),
    ],
    ids=["selects", "hides", "minimum", "adds"],
)
def test_what_a_mask_hides_counts_in_no_length(mask, golden):
    arrays = qkv(2, HEADS)
    assert_close(scaled_dot_product_attention(*arrays, mask, op="relu"), relu(*arrays, **golden))


def test_options_scale_and_causality_reach_the_op(monkeypatch):
    calls = count(monkeypatch, "pointwise_attention")
    found = scaled_dot_product_attention(*qkv(2, HEADS), is_causal=True, scale=0.3, op="relu", alpha=0.5)
    assert_close(found, relu(*qkv(2, HEADS), causal="upper_left", scale=0.3, alpha=0.5))
    assert calls == ["pointwise_attention"]


def test_an_op_without_bias_serves_float_masks_that_hide():
    q, k, v = qkv(2, HEADS)
    golden = reference.linear_attention(q.numpy(), k.numpy(), v.numpy(), mask=MASK.numpy())

    def linear(mask: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, mask, op="linear")

    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    for call in (linear, compiled):
        assert_agrees(call(HIDING), golden)
    with pytest.raises(NotImplementedError, match=r"linear_attention takes no bias.* other than 0 and -inf"):
        linear(ADDED)
    with pytest.raises(NotImplementedError, match=r"linear_attention takes no bias.* requires gradients"):
        linear(HIDING.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="linear_attention takes no bias"):
        compiled(ADDED)


def test_a_compiled_call_is_one_graph():
    q, k, v = qkv(2, HEADS, heads=2)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=0.3, enable_gqa=True, dropout_p=0.0, op="relu", alpha=0.5
        )

    assert_close(torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v), attend(q, k, v))


def test_dropout_follows_torchs_generator():
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(scaled_dot_product_attention(*qkv(2, HEADS), dropout_p=0.5, op="relu"))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
    assert not torch.equal(runs[0], scaled_dot_product_attention(*qkv(2, HEADS), op="relu"))


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"attn_mask": MASK, "is_causal": True}, ValueError, "is_causal=True goes without attn_mask; got both"),
        ({"attn_mask": MASK.long()}, TypeError, "attn_mask has dtype torch.int64; expected torch.bool or a float"),
        ({"op": "linear", "dropout_p": 0.5}, NotImplementedError, "linear_attention takes no dropout"),
        ({"op": "cosine", "scale": 1.0}, NotImplementedError, r"cosine_attention has no scores .*; got 1.0"),
        ({"op": "sima", "is_causal": True}, NotImplementedError, "sima_attention has no option causal"),
        ({"op": "relu", "mask": MASK}, ValueError, "pointwise_attention takes the options .*; got 'mask'"),
        ({"op": "rely"}, ValueError, "op must be one of .*; got 'rely'"),
    ],
)
def test_what_is_not_served_is_an_error(given, error, text):
    with pytest.raises(error, match=f"scaled_dot_product_attention: .*{text}"):
        scaled_dot_product_attention(*qkv(2, HEADS), **given)


def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.ones(2, 3, 4), torch.ones(2, 5, 4)], layout=torch.jagged)
    with pytest.raises(NotImplementedError, match="does not serve nested tensors; pad them and pass attn_mask"):
        scaled_dot_product_attention(nested, nested, nested)


# ------------------------------------------------------------------------------------- models that call torch's


@pytest.fixture(autouse=True)
def torchs_own_is_back():
    yield
    assert functional.scaled_dot_product_attention is TORCHS
    assert functional.multi_head_attention_forward is MULTI_HEAD
    assert torch.backends.mha.get_fastpath_enabled()


def encoder(dtype: torch.dtype = torch.float64) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, dtype=dtype)
    return nn.TransformerEncoder(layer, 2).eval()


TOKENS = torch.randn(2, 5, 16, dtype=torch.float64, generator=GENERATOR)


def test_llama_calls_the_op_and_computes_what_attnkits_implementation_does(monkeypatch):
    from attnkit.integrations import transformers as integration

    ids = torch.arange(10).reshape(2, 5)
    batch = {"attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])}
    integration.register()
    with torch.no_grad():
        golden, softmax = llama("attnkit_relu")(ids, **batch).logits, llama("sdpa")(ids, **batch).logits
        calls = count(monkeypatch, "pointwise_attention")
        with replace_sdpa("relu"):
            found = llama("sdpa")(ids, **batch).logits
    assert calls == ["pointwise_attention"] * 2
    tokens = batch["attention_mask"].bool()
    assert_close(found[tokens], golden[tokens], 2 * (LAYER + 5))
    assert float((found - softmax)[tokens].abs().max()) > 1e-3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_fast_path_of_encoders_does_not_go_round_it(mode, monkeypatch):
    """torch's own layers in evaluation, padded or not."""
    model, padding = encoder(), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    calls = count(monkeypatch, "pointwise_attention")
    trained = encoder().requires_grad_(True)
    with replace_sdpa("relu"):
        golden = [trained(TOKENS), trained(TOKENS, src_key_padding_mask=padding)]
        with mode():
            found = [model(TOKENS), model(TOKENS, src_key_padding_mask=padding)]
    assert calls == ["pointwise_attention"] * 8
    for x, y in zip(found, golden, strict=True):
        assert_close(x, y, 2 * (LAYER + 5))
    with mode():
        assert float((model(TOKENS) - golden[0]).abs().max()) > 1e-3


def test_torchs_modules_give_the_weights_of_the_op(monkeypatch):
    """All that its module can be made with, as our own module computes it."""
    made = {"kdim": 6, "vdim": 3, "add_bias_kv": True, "add_zero_attn": True, "dtype": torch.float64}
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 2, **made)
    x, y, z = (torch.randn(n, 2, e, dtype=torch.float64, generator=GENERATOR) for n, e in ((3, 16), (5, 6), (5, 3)))
    masks = {"key_padding_mask": torch.arange(5).expand(2, -1) >= 3, "attn_mask": torch.zeros(3, 5, dtype=torch.bool)}
    calls = count(monkeypatch, "pointwise_attention")
    with replace_sdpa("relu"):
        found = module(x, y, z, **masks)
    for ours, golden in zip(found, MultiheadAttention.replacing(module, "relu")(x, y, z, **masks), strict=True):
        assert_close(ours, golden, LAYER)
    assert calls == ["pointwise_attention"] * 2


def test_blocks_nest_and_exceptions_leave_nothing_behind(monkeypatch):
    calls = count(monkeypatch, "pointwise_attention", "linear_attention", "sigmoid_attention")

    def run() -> None:
        functional.scaled_dot_product_attention(*qkv(2, HEADS))

    with replace_sdpa("relu"):
        run()
        with pytest.raises(ZeroDivisionError), replace_sdpa("linear"):
            _ = run(), 1 / 0
        run()
    run()
    set_sdpa("sigmoid")
    try:
        run()
        with replace_sdpa("linear"):
            run()
        run()
    finally:
        set_sdpa(None)
    run()
    expected = ["pointwise", "linear", "pointwise", "sigmoid", "linear", "sigmoid"]
    assert calls == [f"{name}_attention" for name in expected]
    with pytest.raises(ValueError, match="set_sdpa: op=None takes no options; got alpha"):
        set_sdpa(None, alpha=1.0)


def test_blocks_that_are_left_out_of_order_put_torchs_back(monkeypatch):
    calls = count(monkeypatch, "pointwise_attention", "linear_attention")
    first, second = replace_sdpa("relu"), replace_sdpa("linear")
    first.__enter__()
    second.__enter__()
    functional.scaled_dot_product_attention(*qkv(2, HEADS))
    with pytest.warns(UserWarning, match=r"nothing called scaled_dot_product_attention; pointwise_attention computed"):
        first.__exit__(None, None, None)
    functional.scaled_dot_product_attention(*qkv(2, HEADS))
    second.__exit__(None, None, None)
    assert calls == ["linear_attention"] * 2


def in_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def call() -> Tensor:
    return functional.scaled_dot_product_attention(*qkv(2, HEADS))


def test_other_threads_compute_it_too_or_their_own(monkeypatch):
    calls = count(monkeypatch, "pointwise_attention", "linear_attention")
    raised = []

    def unknown() -> None:
        with pytest.raises(RuntimeError, match="blocks of several contexts hold in other threads"):
            call()
        raised.append(True)

    def other() -> None:
        call()
        with replace_sdpa("linear"):
            call()
            in_thread(unknown)

    with replace_sdpa("relu"):
        in_thread(other)
        call()
    assert calls == ["pointwise_attention", "linear_attention", "pointwise_attention"]
    assert raised == [True]


def test_tasks_compute_their_own_op(monkeypatch):
    """In turns, in one thread: two inside blocks, one outside, and one that outlives the block that it began in."""
    calls = count(monkeypatch, "pointwise_attention", "linear_attention")
    plain = []

    async def inside(op: str) -> list[str]:
        own = []
        with replace_sdpa(op):
            for _ in range(3):
                call()
                own.append(calls[-1])
                await asyncio.sleep(0)
        return own

    async def outside() -> None:
        for _ in range(3):
            plain.append(torch.equal(call(), TORCHS(*qkv(2, HEADS))))
            await asyncio.sleep(0)

    async def begun_inside() -> asyncio.Task[None]:
        with replace_sdpa("relu"):
            call()
            return asyncio.create_task(outside())

    async def all_of_them() -> list[list[str]]:
        late = await begun_inside()
        found = await asyncio.gather(inside("relu"), inside("linear"), outside())
        await late
        return found[:2]

    assert asyncio.run(all_of_them()) == [["pointwise_attention"] * 3, ["linear_attention"] * 3]
    assert plain == [True] * 6


def test_a_compiled_model_in_tasks_follows_them():
    """torch.compile cannot ask for the context, so the call stays outside of its programs."""
    compiled = torch.compile(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v) + 1, backend="eager")
    q, k, v = qkv(2, HEADS)

    async def inside(op: str) -> None:
        with replace_sdpa(op):
            await asyncio.sleep(0)
            for _ in range(2):
                assert_close(compiled(q, k, v) - 1, scaled_dot_product_attention(q, k, v, op=op))
                await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(inside("relu"), inside("softplus"))

    asyncio.run(both())


def test_checkpointed_layers_are_run_again_with_the_op(monkeypatch):
    calls = count(monkeypatch, "pointwise_attention")
    layer = encoder().layers[0]
    with replace_sdpa("relu"):
        grads = []
        for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
            x = TOKENS.clone().requires_grad_()
            grads.append(torch.autograd.grad(run(x).sin().sum(), x)[0])
    assert_close(grads[1], grads[0])
    assert calls == ["pointwise_attention"] * 3


def test_compiled_models_follow_the_place():
    """The op is in the program: a program that calls torch's function would be cached for whatever is in its place."""
    model, called = encoder().layers[0].self_attn, set()
    trace_rules.get_torch_obj_rule_map.cache_clear()
    with replace_sdpa("relu"):  # as where the compiler is loaded while another op is in the place
        sdpa._list_functions()
        call()
        assert functional.multi_head_attention_forward not in trace_rules.get_torch_obj_rule_map()
    assert MULTI_HEAD in trace_rules.get_torch_obj_rule_map()

    def backend(program: torch.fx.GraphModule, _: object) -> object:
        called.update(getattr(node.target, "__name__", "") for node in program.graph.nodes)
        return program

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for op, options in (("relu", {}), ("relu", {"alpha": 0.5}), ("linear", {}), ("relu", {})):
        with torch.no_grad():
            with replace_sdpa(op, **options):  # no warning: the compiled call is seen
                found = compiled(TOKENS, TOKENS, TOKENS, need_weights=False)[0]
            with replace_sdpa(op, **options):
                assert_close(found, model(TOKENS, TOKENS, TOKENS, need_weights=False)[0], LAYER)
    assert "linear" in called
    assert "multi_head_attention_forward" not in called
    with torch.no_grad():
        found = compiled(TOKENS, TOKENS, TOKENS, need_weights=False)[0]
        assert_close(found, model(TOKENS, TOKENS, TOKENS, need_weights=False)[0], LAYER)
