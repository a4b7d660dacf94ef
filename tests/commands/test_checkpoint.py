"""`lmtrain checkpoint list|inspect|verify`, on real checkpoints of a tiny state."""

import os
import re
import shutil

import jax.numpy as jnp
import pytest

from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.config import CheckpointerConfig, Kind


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two runs: `one` with a permanent and a temporary checkpoint of another config, `two` with one."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for run, steps in (("one", {5: Kind.PERMANENT, 8: Kind.TEMPORARY}), ("two", {3: Kind.PERMANENT})):
        checkpointer = Checkpointer(str(folder / run), CheckpointerConfig())
        for step, kind in steps.items():
            info = {
                "run_id": run,
                "config": {"trainer": {"num_train_steps": step}},
                "identity": {"model": {"hidden_dim": 8}},
                "machine": {"device": "cpu"},
                "versions": {"jax": "1"},
            }
            checkpointer.save(step, kind, {"params": {"w": jnp.arange(1000.0)}}, info)
        checkpointer.close()
    return folder


def test_list_shows_each_run_with_its_checkpoints_and_what_changed_between_them(made, run_cli):
    out = run_cli("checkpoint", "list", made, code=0).stdout
    plain = re.sub(r" +[\d.]+ KiB +\S+ ago", " SIZE AGE", out.replace(str(made), "F"))
    assert plain.splitlines() == [
        "F/one",
        "  step-5         permanent SIZE AGE",
        "  step-8         temporary SIZE AGE",
        "    trainer.num_train_steps: step-5 has 5, step-8 has 8",
        "F/two",
        "  step-3         permanent SIZE AGE",
    ]


def test_inspect_shows_the_newest_checkpoint_of_a_run(made, run_cli):
    out = run_cli("checkpoint", "inspect", made / "one", code=0).stdout
    for line in ("step-8 ", "run       one", "arrays    params", "device cpu", "jax 1", "model.hidden_dim = 8"):
        assert line in out
    assert "trainer.num_train_steps: step-5 has 5, step-8 has 8" in out


def test_verify_distinguishes_valid_from_corrupt_checkpoints_and_exits_with_1(made, run_cli, tmp_path):
    out = run_cli("checkpoint", "verify", made, code=0).stdout
    assert out.count(": valid, ") == 3
    data = made / "two" / "step-3" / "run.json"
    data.write_bytes(data.read_bytes().replace(b"two", b"tow"))
    out = run_cli("checkpoint", "verify", made, code=1).stdout
    data.write_bytes(data.read_bytes().replace(b"tow", b"two"))
    assert out.count(": valid, ") == 2
    assert f"{made}/two/step-3: CORRUPT: run.json: " in out
    for step in (5, 7):
        shutil.copytree(made / "one" / "step-5", tmp_path / "run" / f"step-{step}")
    (tmp_path / "run" / "step-7" / "manifest.json").unlink()
    os.makedirs(tmp_path / "run" / "damaged-step-4")
    run_cli("checkpoint", "verify", tmp_path, code=1)
    listed = run_cli("checkpoint", "list", tmp_path).stdout
    assert [
        re.search(f"{name} +{state}", listed) is None
        for name, state in (("step-7", "CORRUPT: manifest missing"), ("damaged-step-4", "corrupt"))
    ] == [False, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["list", "nowhere"], "checkpoint nowhere: "), (["list", ""], "PATH: "), (["list"], "PATH")],
)
def test_user_errors_are_printed_with_exit_code_2(arguments, message, run_cli):
    assert message in run_cli("checkpoint", *arguments, code=2).stderr


def test_checkpoints_that_are_links_are_found_like_others(made, run_cli, tmp_path):
    (tmp_path / "run").symlink_to(made / "one")
    assert "step-8 " in run_cli("checkpoint", "list", tmp_path).stdout


def test_secrets_that_an_earlier_version_saved_are_not_shown(tmp_path, run_cli):
    secret = {"initialize_from": "https://me:planted@host/a?sig=planted", "api_key": "planted"}
    checkpointer = Checkpointer(str(tmp_path / "one"), CheckpointerConfig())
    for step in (1, 2):
        info = {
            "run_id": "one",
            "config": {"a": {"password": f"planted{step}"}},
            "identity": {"lora": secret},
            "machine": {},
            "versions": {},
        }
        checkpointer.save(step, Kind.PERMANENT, {"params": {"w": jnp.arange(8.0)}}, info)
    checkpointer.close()
    for action in ("list", "inspect"):
        done = run_cli("checkpoint", action, "one", code=0)
        assert "planted" not in done.stdout + done.stderr
    assert "lora.initialize_from = 'https://***@host/a?***'" in done.stdout
