"""The mean of checkpoints."""

import pytest
import torch
from safetensors.torch import save_file

from attnkit_experiments.engine.averaging import average_weights
from attnkit_experiments.engine.checkpoint import Checkpoints, read_weights, seals, stored_weights
from attnkit_experiments.engine.errors import UserError
from attnkit_experiments.engine.optim import TrainConfig, make_optimizer
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


def test_stored_checkpoints_can_be_averaged(tmp_path):
    models = [translator(seed=seed) for seed in (0, 1)]
    for step, model in enumerate(models):
        optimizer = make_optimizer(model, TrainConfig(steps=1))
        model(*tokens()).sum().backward()
        optimizer.step()
        with Checkpoints(tmp_path, config_hash="x", model=model, optimizer=optimizer) as checkpoints:
            checkpoints.save(step=step, seconds=0.0)
    mean = average_weights(map(stored_weights, seals(tmp_path)))
    states = [model.state_dict() for model in models]
    assert mean.keys() == states[0].keys()
    for name, x in mean.items():
        assert_close(x, sum(state[name] for state in states) / 2)
    models[0].load_state_dict(mean)


def test_files_that_are_no_weights_are_refused_by_name(tmp_path):
    torn, missing = tmp_path / "torn.safetensors", tmp_path / "missing.safetensors"
    save_file({"x": torch.zeros(100)}, torn)
    torn.write_bytes(torn.read_bytes()[:200])
    for path in (torn, missing):
        with pytest.raises(UserError, match=f"{path}: cannot be read as weights"):
            read_weights(path)
