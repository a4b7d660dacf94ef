"""LoRA in a run of two processes: the losses and the adapters are those of one."""

import json

import numpy as np
import pytest
from conftest import run_in_process, tiny_settings
from multihost.test_training import complete
from safetensors.numpy import load_file

pytestmark = [pytest.mark.end_to_end, pytest.mark.long]


def test_two_processes_have_the_losses_and_adapters_of_one(tmp_path):
    base = tiny_settings()
    base["trainer"] |= {"num_train_steps": 2, "steps_per_eval": 2, "id": "base"}
    (tmp_path / "base.json").write_text(json.dumps(base))
    for command in (["train", "base.json"], ["export-hf", "base.json", "--output", "base"]):
        assert run_in_process(command, tmp_path).returncode == 0
    settings = tiny_settings()
    settings["trainer"] |= {"num_train_steps": 4, "model_axis_size": 2, "tensor_parallel_axes": ["mlp", "heads"]}
    settings["trainer"] |= {"steps_per_eval": 4, "per_device_parallelism": 1}
    settings |= {"initialize_from_hf": "base", "hf_save_path": "exports"}
    settings["lora"] = {"r": 4, "alpha": 16, "modules_to_save": ["lm_head"]}
    (tmp_path / "tiny.json").write_text(json.dumps(settings))
    found = []
    for count in (1, 2):
        run = f"of-{count}"
        lines = complete(tmp_path, run, count)
        losses = [line["train/loss"] for line in lines if "train/loss" in line]
        adapters = load_file(tmp_path / "exports" / run / "step-4" / "adapter_model.safetensors")
        info = json.loads((tmp_path / "checkpoints" / run / "step-4" / "run.json").read_text())
        found.append((losses, adapters, info["base"]["fingerprint"]))
    (losses, adapters, mark), (theirs, their_adapters, their_mark) = found
    assert mark == their_mark
    np.testing.assert_allclose(theirs, losses, rtol=1e-5)
    assert their_adapters.keys() == adapters.keys()
    for name, values in adapters.items():
        np.testing.assert_allclose(their_adapters[name], values, rtol=0, atol=2e-3, err_msg=name)
