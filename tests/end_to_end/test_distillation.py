"""Distillation from the command line: a small model learns from a larger one; resumed, planned, and refused."""

import json
import shutil

import numpy as np
import pytest
from chat_tokenizer import write_chat_tokenizer
from conftest import logged, run_in_process, tiny_settings
from end_to_end.small_models import assert_resumes_with_the_same_bits, copy_of_base, write
from faults.runs import array_bytes, arrays

pytestmark = pytest.mark.end_to_end


def run(folder, *arguments, code=0):
    return run_in_process(arguments, folder, code)


@pytest.fixture(scope="module")
def folder(tiny_llama, tmp_path_factory):
    """A folder with the model `teacher`, and a run `student`, of another family and size, trained for 8 steps."""
    folder = copy_of_base(tiny_llama, tmp_path_factory, "distillation")
    (folder / "base").rename(folder / "teacher")
    settings = tiny_settings()
    settings["model"] |= {"hidden_dim": 16, "num_layers": 1}
    settings["trainer"] |= {"id": "student", "num_train_steps": 8, "steps_per_eval": 8}
    write(folder, "student", settings | {"objective": {"type": "distill", "teacher": "teacher", "temperature": 2.0}})
    (folder / "output.txt").write_text(run(folder, "train", "student.yaml").stderr)
    return folder


def test_the_divergence_and_the_evaluation_loss_fall(folder):
    losses = logged(folder, "train/loss", "student")
    assert losses[8] < losses[1]
    assert logged(folder, "eval/loss", "student")[8] < np.log(384)
    assert "teacher: teacher, float32, frozen" in (folder / "output.txt").read_text()
    # checkpoints do not have the teacher
    assert not [name for name in arrays(folder, 8, "student") if "teacher" in name or "rope" in name]
    sizes = {name: len(content) for name, content in array_bytes(folder, 8, "student").items()}
    assert max(sizes.values()) < 4 * 384 * 32  # the teacher's table


def test_a_resumed_run_is_the_straight_run(folder):
    assert_resumes_with_the_same_bits(folder, "student.yaml", "student")


def test_a_teacher_that_has_changed_is_refused(folder):
    """Its weights, then with the same weights what it computes."""
    longer = ("train", "student.yaml", "--trainer.num_train_steps", 9)
    shutil.move(folder / "teacher", folder / "kept")
    run(folder, "export-hf", "base.yaml", "--checkpoint", "checkpoints/base/step-4", "--output", "teacher")
    assert "objective.teacher: teacher has changed" in run(folder, *longer, code=2).stderr
    shutil.rmtree(folder / "teacher")
    shutil.copytree(folder / "kept", folder / "teacher")
    path = folder / "teacher" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-3}))
    assert "layer_norm_epsilon: the checkpoint has 1e-05, this" in run(folder, *longer, code=2).stderr
    shutil.rmtree(folder / "teacher")
    shutil.move(folder / "kept", folder / "teacher")


def test_other_commands_read_the_run_without_its_teacher(folder):
    shutil.move(folder / "teacher", folder / "gone")
    assert "eval/loss" in run(folder, "eval", "student.yaml").stdout
    run(folder, "export-hf", "student.yaml", "--output", "exported", "--verify")
    assert "objective.teacher: " in run(folder, "train", "student.yaml", "--trainer.id", "new", code=2).stderr
    shutil.move(folder / "gone", folder / "teacher")


def test_a_teacher_that_does_not_fit_is_refused(folder):
    def refused(*changes):
        return run(folder, "train", "student.yaml", "--trainer.id", "refused", *changes, code=2).stderr

    assert "objective.teacher: teacher has a context of 64" in refused("--model.seq_len", 128)
    write_chat_tokenizer(folder / "larger")
    for tokenizer in ("larger", "byte"):
        assert "objective.teacher: " in refused("--data.tokenizer", tokenizer, "--data.cache_dir", "other")
    assert "optimizer.type: sophia-g" in refused("--optimizer.type", "sophia-g")
    assert not (folder / "checkpoints/refused").exists()
