"""Settings that have no effect without another one, and are set although that one is not."""

from collections.abc import Callable, Mapping

from lmtrain.config.errors import UserError
from lmtrain.config.tree import Path
from lmtrain.data.formats import TextFormat
from lmtrain.run.config import RunConfig


def may_validate(config: RunConfig) -> bool:
    """Whether there may be validation text: a dataset may have a split of it."""
    return any(source.urls("validation") or source.id for source in config.data.sources().values())


# Setting -> whether it has an effect, and what that takes.
_NEEDS: Mapping[str, tuple[Callable[[RunConfig], object], str]] = {
    "hf_save_steps": (lambda c: c.hf_save_path or c.hf_upload, "hf_save_path or hf_upload"),
    "eval_harness_steps": (lambda c: c.eval_harness, "eval_harness"),
    "eval_harness.fewshot_as_multiturn": (
        lambda c: c.eval_harness and c.eval_harness.apply_chat_template,
        "eval_harness.apply_chat_template",
    ),
    "allow_other_tokenizer": (lambda c: c.initialize_from_hf, "initialize_from_hf"),
    "lora.allow_other_base": (lambda c: c.lora and c.lora.initialize_from, "lora.initialize_from"),
    "trainer.sample_length": (lambda c: c.trainer.sample_prompts, "trainer.sample_prompts"),
    "trainer.steps_per_eval": (
        lambda c: may_validate(c) or c.trainer.sample_prompts or c.trainer.steps_per_eval is None,
        "validation text (data.validation_urls)",
    ),
    "trainer.max_eval_batches": (
        lambda c: may_validate(c) and c.trainer.evaluates,
        "validation text (data.validation_urls) and trainer.steps_per_eval",
    ),
    "trainer.watch.include_per_parameter_norms": (
        lambda c: c.trainer.watch.watch_targets,
        "trainer.watch.watch_targets",
    ),
    "trainer.watch.interval": (lambda c: c.trainer.watch.watch_targets, "trainer.watch.watch_targets"),
    "trainer.allow_slow_products": (lambda c: c.trainer.precision.products, "q in trainer.mp"),
    "trainer.checkpointer.staging_dir": (
        lambda c: (
            "://" in c.trainer.checkpointer.base_path and not c.trainer.checkpointer.base_path.startswith("gs://")
        ),
        "a URL other than gs:// as trainer.checkpointer.base_path",
    ),
    "data.text_key": (
        lambda c: any(isinstance(source.format, TextFormat) for source in c.data.sources().values()),
        "data.format.type: text; other formats have settings for their own keys",
    ),
    "data.max_bad_fraction": (lambda c: c.data.on_bad_record == "skip", "data.on_bad_record: skip"),
    "data.stop_strategy": (lambda c: c.data.configs, "a mixture (data.configs)"),
    "data.mirror_dir": (lambda c: "://" in c.data.cache_dir, "a URL as data.cache_dir"),
    "data.max_mirror_bytes": (lambda c: "://" in c.data.cache_dir, "a URL as data.cache_dir"),
    "optimizer.rewarmup": (lambda c: c.optimizer.cycles or c.optimizer.cycle_length, "several optimizer.cycles"),
    **dict.fromkeys(
        ("optimizer.decay", "optimizer.min_lr_ratio"),
        (lambda c: c.optimizer.lr_schedule != "constant", "another optimizer.lr_schedule than constant"),
    ),
    "optimizer.weight_decay_modules": (lambda c: c.optimizer.weight_decay, "optimizer.weight_decay above 0"),
    "optimizer.default_weight_decay_mask": (lambda c: c.optimizer.weight_decay, "optimizer.weight_decay above 0"),
}


def without_effect(config: RunConfig) -> dict[Path, str]:
    """A message about each setting that differs from its default and has no effect, by its path."""
    found: dict[Path, str] = {}
    for name, (has_effect, needed) in _NEEDS.items():
        path: Path = tuple(name.split("."))
        if _is_changed(config, path) and not has_effect(config):
            found[path] = f"{name}: has no effect; it requires {needed}"
    return found


def _is_changed(config: RunConfig, path: Path) -> bool:
    section: object = config
    for part in path[:-1]:
        section = getattr(section, str(part), None)
    field = getattr(type(section), "model_fields", {}).get(path[-1])
    return field is not None and getattr(section, str(path[-1])) != field.get_default(call_default_factory=True)


def check_evaluation(config: RunConfig, has_validation: bool) -> None:
    """Raise `UserError` for a setting that takes effect after evaluations, if there are none."""
    trainer = config.trainer
    if has_validation or config.eval_harness is not None:
        return
    for name, setting in (
        ("early_stopping", trainer.early_stopping),
        ("checkpointer.keep_best", trainer.checkpointer.keep_best),
    ):
        if setting is not None:
            raise UserError(
                f"trainer.{name}: the run has no evaluation, whose metrics it compares; set data.validation_urls (and "
                "trainer.steps_per_eval), or eval_harness"
            )
