"""Checks that a checkpoint belongs to a run."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from lmtrain.checkpoint.discovery import Checkpoint
from lmtrain.config.tree import describe_differences, require_equal
from lmtrain.optim.schedules import build_schedule
from lmtrain.run.config import RunConfig
from lmtrain.run.run import omitted, without_tunable
from lmtrain.runtime.logging import log
from lmtrain.weights.export_folder import export_folder, is_missing

# Key of a checkpoint's run info: the evaluation of its step was ended by a signal.
EVALUATION_PENDING = "evaluation_pending"

# Key of a checkpoint's run info: the best evaluations so far, as in `lmtrain/train/loop/saver.py`.
DECISIONS = "decisions"

# Factor between two steps by which a learning rate must change, beyond what was planned, to be warned about.
_JUMP = 1.05


def check_identity(checkpoint: Checkpoint, now: Mapping[str, Any]) -> None:
    """Raise `UserError` if model, tokenizer, data or seed differ."""
    saved = checkpoint.read_run_info()["identity"]
    problem = f"{checkpoint.path} belongs to another run"
    advice = "set another trainer.id, or restore the config"
    require_equal(without_tunable(saved), without_tunable(now), problem, advice, omitted)


def is_done(own: Checkpoint, config: RunConfig, now: Mapping[str, Any], run: str) -> bool:
    """Whether the run's own checkpoint contains all its steps, or ended early; evaluated and exported.

    `now` is the run's identity. Raises `UserError` if the checkpoint belongs to another run.
    """
    if own.step < config.trainer.num_train_steps and not ended_early(own, config):
        return False
    check_identity(own, now)
    return EVALUATION_PENDING not in own.read_run_info() and not is_missing(
        export_folder(config.hf_save_path, run), own.step
    )


def ended_early(own: Checkpoint, config: RunConfig) -> bool:
    """Whether early stopping, as set now, has ended the run."""
    stopping = config.trainer.early_stopping
    saved = own.read_run_info().get(DECISIONS, {}).get("stop")
    if stopping is None or saved is None or (saved["metric"], saved["mode"]) != (stopping.metric, stopping.mode):
        return False
    return bool(saved["waited"] >= stopping.patience)


def check_same_run(checkpoint: Checkpoint, run_info: Mapping[str, Any]) -> None:
    """Raise `UserError` if model, tokenizer, data or seed differ; log what else has changed.

    Steps, intervals, trackers, learning rate, mesh and accumulation may change from one start to the next.
    """
    check_identity(checkpoint, run_info["identity"])
    saved = checkpoint.read_run_info()
    for part in ("config", "machine", "versions"):
        for line in describe_differences(saved[part], run_info[part], "the checkpoint", "this run"):
            log.info(f"changed since {checkpoint.path}: {line}")
    _warn_of_rate_jump(checkpoint.step, saved["config"], run_info["config"])
    before, now = (part["machine"].get("xla_options") for part in (saved, run_info))
    if None not in (before, now) and before != now:
        log.warning(
            "XLA options differ from those of the checkpoint: results may differ in their last bits; for the same bits "
            "keep trainer.xla_options and the platform"
        )


def _warn_of_rate_jump(step: int, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Warn if the learning rate jumps at this step, for example because a run is extended after its decay.

    A rate that drops with the peak is what was asked for.
    """
    try:
        before, planned, after = _rate(saved, step - 1), _rate(saved, step), _rate(now, step)
        lowered = min(1.0, now["optimizer"]["learning_rate"] / saved["optimizer"]["learning_rate"])
    except (ValidationError, KeyError):  # a config of an earlier version
        return
    if after > _JUMP * max(before, planned):
        log.warning(
            f"learning rate rises from {before:.3g} to {after:.3g} after step {step:,}, as the schedule has changed. "
            "To avoid the jump, resume from a checkpoint before the decay, and set optimizer.decay to the number of "
            "decay steps, which keeps the peak until then"
        )
    elif _JUMP * after < lowered * min(before, planned):
        log.warning(
            f"learning rate drops from {before:.3g} to {after:.3g} after step {step:,}, as the schedule has changed. "
            "To avoid the jump, restore trainer.num_train_steps and the schedule, or resume from a checkpoint before "
            "the decay of the new schedule"
        )


def _rate(config: Mapping[str, Any], step: int) -> float:
    """The learning rate of the update after `step` updates, from a resolved config."""
    steps = config["trainer"]["num_train_steps"]
    chosen = RunConfig.model_validate({"optimizer": config["optimizer"], "trainer": {"num_train_steps": steps}})
    return float(build_schedule(chosen.optimizer, steps)(step))
