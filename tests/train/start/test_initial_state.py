"""The initial state of a run: the numbered list of `lmtrain/train/start/initial_state.py`, one by one."""

import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lmtrain.checkpoint.checkpointer import Checkpointer
from lmtrain.checkpoint.config import CheckpointerConfig, Kind
from lmtrain.run.config import RunConfig, resolved
from lmtrain.run.run import identity
from lmtrain.runtime.errors import UserError
from lmtrain.train.program.program import build_program
from lmtrain.train.start.initial_state import begin, own_checkpoint

MODEL = {"type": "gpt2", "hidden_dim": 8, "num_heads": 2, "num_layers": 1, "seq_len": 8}
VOCAB = 16


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def configure(optimizer=None, model=None, **settings) -> RunConfig:
    top = {name: settings.pop(name) for name in ("initialize_from_checkpoint_path",) if name in settings}
    return RunConfig(
        model=MODEL | (model or {}),
        trainer={"train_batch_size": 4, **settings},
        optimizer={"warmup": 2, **(optimizer or {})},
        **top,
    )


def info(config: RunConfig) -> dict:
    same = identity(config) | {"optimizer": {"type": config.optimizer.type}}
    return {
        "identity": same | {"tokenizer": {"fingerprint": "x"}, "data_tokens": "y"},
        "config": resolved(config),
        "machine": {"device": "cpu"},
        "versions": {"jax": "1"},
    }


def save(run: str, step: int, config: RunConfig | None = None):
    """Save a checkpoint whose values all differ from initial ones. -> its state"""
    config = config or configure()
    state = build_program(config, VOCAB).init()
    state = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf) + np.asarray(step, leaf.dtype)), state)
    checkpointer = Checkpointer(f"checkpoints/{run}", CheckpointerConfig())
    checkpointer.save(step, Kind.PERMANENT, state.parts, info(config))
    checkpointer.close()
    return state


def start(config: RunConfig, run: str = "mine", hf: str | None = None, fresh: RunConfig | None = None):
    checkpointer = Checkpointer(f"checkpoints/{run}", config.trainer.checkpointer)
    try:
        own = own_checkpoint(config, checkpointer)
        return begin(build_program(config, VOCAB), own, info(fresh or config), hf)
    finally:
        checkpointer.close()


def same(one, other) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), one, other)))


def test_1_a_run_resumes_from_its_newest_checkpoint_and_ignores_initialize_settings(caplog):
    save("mine", 3)
    newest = save("mine", 5)
    save("other", 9)
    for setting in ("initialize_from", "initialize_from_checkpoint_path"):
        config = configure(**{setting: "checkpoints/other"})
        with caplog.at_level(logging.INFO):
            state, step = start(config, fresh=configure())
        assert step == int(state.step) == 5
        assert same(state.parts, newest.parts)
        assert f"{setting}: ignored, as this run has checkpoints" in caplog.text


def test_1_load_checkpoint_path_is_used_until_the_run_has_its_own_checkpoints(caplog):
    elsewhere = save("elsewhere", 7)
    config = configure(load_checkpoint_path="checkpoints/elsewhere")
    state, step = start(config)
    assert step == 7
    assert same(state.parts, elsewhere.parts)
    save("mine", 8)
    with caplog.at_level(logging.INFO):
        assert start(config)[1] == 8
    assert "trainer.load_checkpoint_path: ignored, " in caplog.text


def test_1_load_checkpoint_requires_or_forbids_a_checkpoint():
    with pytest.raises(UserError, match=r"trainer\.load_checkpoint: no complete checkpoint in .*mine"):
        start(configure(load_checkpoint=True))
    assert start(configure())[1] == 0
    save("mine", 3)
    assert start(configure(load_checkpoint=True))[1] == 3
    with pytest.raises(UserError, match=r"load_checkpoint is false, but this run has .*step-3"):
        start(configure(load_checkpoint=False))
    assert start(configure(load_checkpoint=False), run="fresh")[1] == 0
    with pytest.raises(UserError, match="no such folder"):
        start(configure(load_checkpoint_path="nowhere"), run="another")


def test_2_the_complete_state_of_another_run_with_its_step():
    other = save("other", 9)
    state, step = start(configure(initialize_from="checkpoints"))  # a parent folder is allowed
    assert step == int(state.step) == 9
    assert same(state.parts, other.parts)


def test_3_parameters_and_moments_of_another_run_at_step_0_with_a_new_schedule():
    other = save("other", 9)
    state, step = start(configure(initialize_from_checkpoint_path="checkpoints/other/step-9"))
    assert step == int(state.step) == 0
    assert same(state.params, other.params)
    *moments, rate = state.opt_state
    *expected, old_rate = other.opt_state
    assert same(moments, expected)
    assert (int(rate.step), int(old_rate.step)) == (0, 9)


def test_5_a_new_run_logs_that_its_parameters_are_initialized(caplog):
    with caplog.at_level(logging.INFO):
        _, step = start(configure(seed=7))
        save("mine", 3, configure(seed=7))
        start(configure(seed=7))
    assert step == 0
    expected = "a new run: parameters are initialized from trainer.seed 7"
    assert [message for message in caplog.messages if message.startswith("a new run")] == [expected]


@pytest.mark.parametrize("setting", ["initialize_from", "initialize_from_checkpoint_path"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"hidden_dim": 16}}, "model.hidden_dim: the checkpoint has 8, this config has 16"),
        ({"optimizer": {"type": "lion"}}, "optimizer.type: the checkpoint has 'adam', this config has 'lion'"),
    ],
)
def test_the_state_of_another_model_or_optimizer_is_refused(setting, change, message):
    save("other", 9)
    with pytest.raises(UserError, match=message):
        start(configure(**{setting: "checkpoints/other"}, **change))


@pytest.mark.parametrize("setting", ["initialize_from", "initialize_from_checkpoint_path"])
def test_a_missing_initial_checkpoint_is_reported_with_its_setting(setting):
    with pytest.raises(UserError, match=f"{setting}: checkpoint nowhere: no such folder"):
        start(configure(**{setting: "nowhere"}))


def test_missing_arrays_are_an_error_or_newly_initialized():
    """The checkpoint was saved without skip_bad_steps."""
    other = save("mine", 9)
    more = {"optimizer": {"skip_bad_steps": True}}
    with pytest.raises(
        UserError, match=r"step-9: missing .* optimizer/.* more; .*trainer.allow_partial_checkpoint: true"
    ):
        start(configure(**more))
    state, step = start(configure(**more, allow_partial_checkpoint=True))
    assert step == 9
    assert same(state.params, other.params)
    fresh = build_program(configure(**more), VOCAB).init().opt_state
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(fresh)


@pytest.mark.parametrize("setting", ["own", "initialize_from", "initialize_from_checkpoint_path"])
def test_a_missing_average_is_initialized_from_the_parameters_of_the_checkpoint(setting, caplog):
    """Not from initial parameters, which would dominate evaluations and exports for many steps."""
    other = save("mine" if setting == "own" else "other", 9)
    where = {} if setting == "own" else {setting: "checkpoints/other"}
    with caplog.at_level(logging.INFO):
        state, _ = start(configure(model_averaging={"beta": 0.9}, **where))
    assert same(state.params, other.params)
    assert same(state.ema_params, other.params)
    assert any("step-9: no EMA" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("params/_METADATA", r"step-9 cannot be read: .*`lmtrain checkpoint verify`"),
        ("run.json", r"step-9: run\.json is missing or "),
    ],
)
def test_corruption_that_was_not_verified_is_reported(name, message):
    save("mine", 9)
    path = Path("checkpoints/mine/step-9", name)
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    with pytest.raises(UserError, match=message):
        start(configure(checkpointer={"verify_on_restore": "sizes"}))


def test_an_initial_step_after_the_last_step_is_refused():
    save("other", 9)
    with pytest.raises(UserError, match=r"initialize_from: .*step-9 is at step 9 .*num_train_steps is 9"):
        start(configure(initialize_from="checkpoints/other", num_train_steps=9))


def test_initialize_from_may_be_removed_from_the_config_of_a_started_run():
    save("mine", 9, configure(initialize_from="checkpoints/gone"))
    assert start(configure())[1] == 9


def test_arrays_of_another_shape_are_refused_also_with_allow_partial_checkpoint():
    save("other", 9)
    config = configure(initialize_from="checkpoints/other", allow_partial_checkpoint=True, model={"hidden_dim": 16})
    with pytest.raises(UserError, match=r"params/blocks/attn/out/bias is \[1, 8\], expected \[1, 16\]"):
        start(config)
