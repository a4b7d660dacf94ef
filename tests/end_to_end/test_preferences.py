"""Preference tuning from the command line: DPO in full and with LoRA, ORPO; resumed, evaluated, and refused."""

import functools
import json
import random
import shutil

import numpy as np
import pytest
from conftest import TRAIN_FILES, log_lines, logged, run_in_process, tiny_settings
from end_to_end.small_models import assert_resumes_with_the_same_bits, copy_of_base, write

from lmtrain.preprocess.documents import read_texts

pytestmark = pytest.mark.end_to_end

METRICS = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen")


def run(folder, *arguments, code=0):
    return run_in_process(arguments, folder, code)


def settings_of(name, objective, **more):
    settings = tiny_settings()
    settings["data"] |= {
        "train_urls": ["pairs.jsonl"],
        "validation_urls": ["held_out.jsonl"],
        "cache_dir": "pairs",
        "format": {"type": "preference"},
    }
    settings["model"] = {"type": "llama", "seq_len": 48}
    settings["optimizer"]["warmup"] = 0
    settings["trainer"] |= {"id": name, "num_train_steps": 8, "steps_per_eval": 8}
    more = {"initialize_from_hf": "base", "use_hf_model_config": True} | more
    return settings | {"objective": objective} | more


@pytest.fixture(scope="module")
def folder(tiny_llama, tmp_path_factory):
    """A folder with a model `base`, pairs of answers (words in their order, and shuffled), and runs of all kinds."""
    folder = copy_of_base(tiny_llama, tmp_path_factory, "preferences")
    texts = [text.split() for text in read_texts(TRAIN_FILES[0], "text")]
    texts = [words[:8] for words in texts if len(words) >= 8]
    shuffle = random.Random(0)
    pairs = []
    for words in texts:
        other = words[3:]
        shuffle.shuffle(other)
        pairs.append(
            {"prompt": " ".join(words[:3]), "chosen": " " + " ".join(words[3:]), "rejected": " " + " ".join(other)}
        )
    for name, part in (("pairs", pairs[:-8]), ("held_out", pairs[-8:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in part))
    write(folder, "dpo", settings_of("dpo", {"type": "dpo"}))
    write(folder, "lora", settings_of("lora", {"type": "dpo"}, lora={"r": 4, "alpha": 8}))
    write(folder, "orpo", settings_of("orpo", {"type": "orpo"}))
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    """`trained(name)` trains this run once. -> the output"""
    return functools.cache(lambda name: run(folder, "train", f"{name}.yaml").stderr)


@pytest.mark.parametrize("name", ["dpo", "lora", pytest.param("orpo", marks=pytest.mark.long)])
def test_runs_learn_the_preference_and_log_it(folder, trained, name):
    output = trained(name)
    first = log_lines(folder, name)
    losses = logged(folder, "train/loss", name)
    if name != "orpo":
        assert losses[1] == pytest.approx(np.log(2), abs=1e-4)  # the model is the reference
        assert logged(folder, "train/rewards/margins", name)[1] == pytest.approx(0, abs=1e-4)
    margins = logged(folder, "train/rewards/margins", name)
    assert margins[8] > margins[1]
    for metric in METRICS:
        assert any(f"eval/preferences/{metric}" in line for line in first), metric
    assert logged(folder, "eval/preferences/rewards/accuracies", name)[8] > 0.5
    assert " % of pairs right" in output


def stored(folder):
    return {path: path.stat().st_mtime_ns for path in (folder / "pairs").glob("*/reference-*.npy")}


@pytest.mark.parametrize("name", ["dpo", pytest.param("lora", marks=pytest.mark.long)])
def test_a_run_that_is_resumed_is_the_straight_run_with_or_without_its_stored_reference(folder, trained, name):
    """One of two files is gone and one is corrupt: both are computed again."""
    trained("dpo")
    before = stored(folder)
    assert len(before) == 2  # one for each split: the base is the reference of both runs
    trained("lora")
    assert stored(folder) == before  # used again
    corrupt, gone = sorted(before)
    content = bytearray(corrupt.read_bytes())
    content[-40:-36] = bytes(4)
    corrupt.write_bytes(content)
    gone.unlink()
    output = assert_resumes_with_the_same_bits(folder, f"{name}.yaml", name)
    assert (output.count(" is corrupt: "), output.count(": log-probabilities of ")) == (1, 2), output
    assert stored(folder).keys() == before.keys()


def test_a_reference_that_has_changed_is_refused(folder, trained):
    trained("dpo")
    kept = {path: path.read_bytes() for path in stored(folder)}
    for path in kept:
        path.unlink()
    shutil.move(folder / "base", folder / "kept")
    run(folder, "export-hf", "base.yaml", "--checkpoint", "checkpoints/base/step-4", "--output", "base")
    output = run(folder, "train", "dpo.yaml", "--trainer.num_train_steps", 9, code=2).stderr
    assert "the model that this run started from has changed" in output  # not another difference
    shutil.rmtree(folder / "base")
    shutil.move(folder / "kept", folder / "base")
    for path, content in kept.items():
        path.write_bytes(content)


@pytest.mark.long
def test_dropout_is_a_warning(folder, trained):
    flags = ["--trainer.id", "drop", "--lora.dropout", 0.1, "--trainer.num_train_steps", 1]
    assert "objective dpo: the model has dropout" in run(folder, "train", "lora.yaml", *flags).stderr
    assert "has dropout" not in trained("lora")


def test_other_commands_read_the_run(folder, trained):
    for name in ("dpo", "lora"):
        trained(name)
        stored = sorted((folder / "cache").rglob("reference-*.npy"))
        if name == "dpo":  # then the reference is computed again
            kept = {path: path.read_bytes() for path in stored}
            for path in stored:
                path.unlink()
        found = json.loads(run(folder, "eval", f"{name}.yaml").stdout)
        for metric in ("loss", *(f"preferences/{metric}" for metric in METRICS)):
            assert found[f"eval/{metric}"] == pytest.approx(logged(folder, f"eval/{metric}", name)[8], abs=1e-5), metric
    assert all(path.read_bytes() == kept[path] for path in kept if path.exists())
    shown = run(folder, "preprocess", "dpo.yaml", "--show", 2).stdout
    assert "pairs.jsonl:1, chosen: " in shown
    assert "pairs.jsonl:2, rejected: " in shown
    run(folder, "export-hf", "lora.yaml", "--output", "merged", "--merge", "--verify")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["--objective.type", "cross_entropy"], "objective.type: cross_entropy"),
        (["--data.format.type", "text"], "data.format"),
        (["--initialize_from_hf", "false"], "objective.type: dpo"),
        (["--data.mask_across_documents", "false"], "mask_across_documents"),
        (["--z_loss_weight", "0.1"], "z_loss_weight: "),
        (["--objective.loss", "ipo", "--objective.label_smoothing", "0.1"], "label_smoothing: "),
        (["--optimizer.type", "sophia-g"], "optimizer.type: sophia-g"),
    ],
)
def test_settings_that_do_not_fit_are_refused(folder, changes, named):
    assert named in run(folder, "train", "dpo.yaml", *changes, code=2).stderr
