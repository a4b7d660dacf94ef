"""Runs with products in 8 bits: bitwise resume, back to 16 bits in the middle, a frozen base in 4 bits, mistakes."""

import json

import pytest
from conftest import logged, run_in_process, tiny_settings
from end_to_end.small_models import assert_resumes_with_the_same_bits, continued, copy_of_base, write
from faults.runs import array_bytes

pytestmark = pytest.mark.end_to_end
MP = "p=f32,c=bfloat16,q="


def settings_of(name, **trainer):
    settings = tiny_settings()
    settings["trainer"] |= {"id": name, "num_train_steps": 8, "mp": f"{MP}fp8", **trainer}
    return settings


@pytest.fixture(scope="module")
def folder(tiny_llama, tmp_path_factory):
    """A folder with `whole`, a run of 8 steps, and the model `base`."""
    folder = copy_of_base(tiny_llama, tmp_path_factory, "eight_bit")
    train(folder, "whole")
    return folder


def train(folder, name, code=0, **trainer):
    write(folder, name, settings_of(name, **trainer))
    return run_in_process(["train", f"{name}.yaml"], folder, code).stderr


def test_a_run_that_resumes_has_the_same_bits(folder):
    assert_resumes_with_the_same_bits(folder, "whole.yaml", "whole")


def test_a_run_can_go_back_to_16_bits_with_the_same_types_of_parameters_and_moments(folder):
    output = continued(folder, "whole.yaml", "whole", "--trainer.mp", "p=f32,c=bfloat16")
    assert "trainer.mp" in output
    assert "q=fp8" in output
    before, after = (logged(folder, "train/loss", name)[8] for name in ("whole", "whole-again"))
    assert before != after
    assert before == pytest.approx(after, rel=0.02)
    plain, small = (array_bytes(folder, 8, name) for name in ("whole-again", "whole"))
    assert {name: len(value) for name, value in plain.items()} == {name: len(value) for name, value in small.items()}
    run_in_process(["export-hf", "whole.yaml", "--output", "exported", "--verify"], folder, 0)


def test_lora_on_a_base_in_4_bits_trains_and_exports_on_the_base_as_it_is(folder):
    settings = settings_of("adapters", mp="p=f32,c=bfloat16")
    settings["model"] = {"type": "llama", "seq_len": 32}
    settings |= {"initialize_from_hf": "base", "use_hf_model_config": True}
    settings["lora"] = {"r": 4, "base_quantization": "nf4"}
    write(folder, "adapters", settings)
    run_in_process(["train", "adapters.yaml"], folder, 0)
    losses = logged(folder, "eval/loss", "adapters")
    run_in_process(["export-hf", "adapters.yaml", "--output", "merged", "--merge", "--verify"], folder, 0)
    found = json.loads(run_in_process(["eval", "adapters.yaml"], folder, 0).stdout)
    *_, last = losses.values()
    assert found["eval/loss"] != last
    assert found["eval/loss"] == pytest.approx(last, rel=0.02)


@pytest.mark.parametrize("products", ["q=fp4", "q=fp8,q=int8"])
def test_a_wrong_format_is_an_error(folder, products):
    assert "trainer.mp" in train(folder, "wrong", code=2, mp=f"p=f32,{products}")
