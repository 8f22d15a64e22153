"""The mean of checkpoints."""

import pytest
import torch
from safetensors.torch import save_file

from attnkit_experiments.engine import checkpoint
from attnkit_experiments.engine.averaging import average_checkpoints, average_weights, read_weights
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.optim import TrainConfig, make_optimizer
from attnkit_experiments.engine.world import World
from tests.experiments.translation_cases import tokens, translator
from tests.library.arrays import assert_close


def test_the_mean_is_taken_in_float64_and_given_back_in_the_dtype_of_the_weights():
    # in bfloat16, 1 + 1/256 is 1: a running sum would lose the small ones
    states = [{"x": torch.tensor([value]).bfloat16(), "n": torch.tensor([3])} for value in (256.0, 1.0, 1.0, 1.0, 1.0)]
    found = average_weights(states)
    assert found["x"].dtype == torch.bfloat16
    assert found["x"].item() == torch.tensor(52.0).bfloat16().item()
    assert found["n"].tolist() == [3]
    assert states[0]["x"].item() == 256, "what was given stays as it is"


def test_states_that_do_not_belong_together_are_refused():
    x = torch.zeros(2)
    with pytest.raises(ValueError, match="no weights were given"):
        average_weights([])
    with pytest.raises(ValueError, match="state 2 has other tensors than the first: y"):
        average_weights([{"x": x}, {"x": x, "y": x}])
    with pytest.raises(ValueError, match=r"x has shape \(3,\), in the first \(2,\)"):
        average_weights([{"x": x}, {"x": torch.zeros(3)}])
    with pytest.raises(ValueError, match="n is no floating-point tensor and differs in state 2"):
        average_weights([{"n": torch.tensor(1)}, {"n": torch.tensor(2)}])


def test_checkpoints_and_weights_alone_can_be_averaged(tmp_path):
    models = [translator(seed=seed) for seed in (0, 1, 2)]
    for step, model in enumerate(models[:2]):
        optimizer = make_optimizer(model, TrainConfig(steps=1))
        model(*tokens()).sum().backward()
        optimizer.step()
        state = {"model": model, "optimizer": optimizer, "world": World()}
        checkpoint.save(tmp_path / str(step), step=step, seconds=0.0, config_hash="x", **state)
    checkpoint.write_weights(tmp_path / "weights.safetensors", models[2].state_dict(), {})
    paths = [*sorted(tmp_path.glob("*/step-*.safetensors")), tmp_path / "weights.safetensors"]
    assert len(paths) == 3
    mean = average_checkpoints(paths)
    states = [model.state_dict() for model in models]
    assert mean.keys() == states[0].keys()
    for name, x in mean.items():
        assert_close(x, sum(state[name] for state in states) / 3)
    models[0].load_state_dict(mean)


def test_files_that_are_no_weights_are_refused_by_name(tmp_path):
    torn, missing = tmp_path / "torn.safetensors", tmp_path / "missing.safetensors"
    save_file({"x": torch.zeros(100)}, torn)
    torn.write_bytes(torn.read_bytes()[:200])
    for path in (torn, missing):
        with pytest.raises(UserError, match=f"{path}: cannot be read as weights"):
            read_weights(path)
