"""`python -m benchmarks variants`: every op that attends to q, k and v is in the table, right in size, and timed."""

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import attnkit
from attnkit_conformance.opdb import PUBLIC
from benchmarks import memory, variants
from benchmarks.__main__ import main


def test_no_variant_is_forgotten():
    attention = {op.name for op in PUBLIC if op.name.endswith("_attention")}
    assert {variant.op for variant in variants.VARIANTS} == attention | {variants.BASELINE}


@pytest.mark.parametrize("mode", variants.MODES)
@pytest.mark.parametrize("causal", [False, True])
def test_the_baseline_is_torch_s_own_kernel_and_the_softmax_of_attnkit_is_not(causal, mode):
    def operations(op):
        with profile(activities=[ProfilerActivity.CPU]) as found:
            variants.thunk(variants.Task(op, causal, 128, mode))()
        return {event.key for event in found.key_averages()}

    kernel = "aten::_scaled_dot_product_flash_attention_for_cpu" + "_backward" * (mode == "forward+backward")
    assert kernel in operations(variants.BASELINE)
    assert (kernel in operations("softmax_attention")) == (attnkit.native_status().level is None)


@pytest.mark.parametrize("task", list(variants.tasks(64, "forward")), ids=lambda task: f"{task.op}-{task.causal}")
def test_calls_give_a_value_for_every_query_and_gradients(task):
    out = variants.thunk(task)()
    assert out.numel() == variants.BATCH * variants.HEADS * 64 * variants.WIDTH
    gradients = variants.thunk(task._replace(mode="forward+backward"))()
    shared = {"soft_attention": 1, "lsh_attention": 1}  # take q for k
    assert [x is None for x in gradients].count(True) == shared.get(task.op, 0)
    assert all(torch.isfinite(x).all() for x in (out, *gradients) if x is not None)


def test_all_are_timed_in_turns_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        variants, "VARIANTS", tuple(variants.BY_OP[op] for op in (variants.BASELINE, "pointwise_attention"))
    )
    monkeypatch.setattr(variants, "AT_LEAST", 1e-4)
    monkeypatch.setattr(memory, "MEASURED", False)
    path = tmp_path / "found.json"
    assert main(["variants", "--rounds", "2", "--lengths", "64", "--out", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["environment"]["rounds"] == 2
    assert found["environment"]["native"] == attnkit.native_status().level
    assert [(row["op"], row["causal"], row["mode"]) for row in found["rows"]] == [
        (op, causal, mode)
        for mode in variants.MODES
        for op in (variants.BASELINE, "pointwise_attention")
        for causal in (False, True)
    ]
    for row in found["rows"]:
        assert row["rounds"] == 2
        assert row["seconds"]["lowest"] > 0
        assert (row["ratio"]["median"] == 1) == (row["op"] == variants.BASELINE)
    assert "pointwise_attention   causal" in capsys.readouterr().out
    assert main(["variants", "--rounds", "1"]) == 2
    assert main(["variants", "--rounds", "2", "--lengths", "64", "--limit", "0", "--out", str(path)]) == 0
    assert {row["rounds"] for row in json.loads(path.read_text())["rows"]} == {1}


@pytest.mark.skipif(not memory.MEASURED, reason="memory of processes is read where Linux tells it")
def test_the_memory_of_a_call_is_its_own():
    task = variants.Task("softmax_attention", False, 64, "forward")
    assert 0 <= memory.in_a_process(variants.peak, task, 1, preload=variants.PRELOAD) < 50
