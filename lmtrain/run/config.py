"""The settings of a run: one section per package; and those that have no effect.

This is the only place that knows all sections; each is defined in the `config.py` of the package that reads it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from lmtrain.config.describe import sections_of
from lmtrain.config.section import as_base, changeable, identity, tunable
from lmtrain.config.tree import Path
from lmtrain.data.config import DataConfig
from lmtrain.data.formats import TextFormat
from lmtrain.evaluation.benchmarks.config import EvalHarnessConfig
from lmtrain.hf.config import HuggingFaceConfig
from lmtrain.lora.config import LoraConfig
from lmtrain.models.attention.names import AttentionNeeds
from lmtrain.models.config import ModelConfig
from lmtrain.models.gpt2.config import Gpt2Config
from lmtrain.models.mixer import SequenceSplit
from lmtrain.objectives.config import CrossEntropyConfig, ObjectiveConfig, WeightedCrossEntropyConfig
from lmtrain.optim.config import AdamConfig, OptimizerConfig, build_cycles
from lmtrain.run.trainer import TrainerConfig, num_microbatches
from lmtrain.runtime.errors import UserError, field_error
from lmtrain.runtime.redact import redact
from lmtrain.transfer.config import TransferConfig, base_of


class RunConfig(HuggingFaceConfig):
    """The settings of a run."""

    data: DataConfig = Field(default_factory=DataConfig, description="Text sources, tokenizer, token cache")
    model: ModelConfig = Field(default_factory=Gpt2Config, description="Model architecture; type selects the family")
    trainer: TrainerConfig = Field(default_factory=TrainerConfig, description="Steps, batch, precision, mesh, logs")
    optimizer: OptimizerConfig = Field(default_factory=AdamConfig, description="Optimizer and learning-rate schedule")
    initialize_from_checkpoint_path: str | None = tunable(
        None,
        description="Checkpoint to load parameters and optimizer moments from; training starts at step 0. With lora, "
        "only parameters: those of the frozen base",
    )
    lora: LoraConfig | None = Field(
        None, description="Train low-rank adapters on a frozen base instead of all parameters; null: all parameters"
    )
    transfer: TransferConfig | None = Field(
        None, description="Take learning rates and initial values from a smaller model (muP, CompleteP); null: as set"
    )
    epoch: int = changeable(
        0, ge=0, description="Number of passes over the data after which training ends; 0: use num_train_steps"
    )
    data_seed: int | None = identity(
        None, ge=0, lt=2**32, description="Seed of the order of the data; null: trainer.seed"
    )
    z_loss_weight: float = changeable(
        0.0, ge=0, description="Weight of logsumexp(logits)^2, added to the training loss"
    )
    objective: ObjectiveConfig = Field(
        default_factory=CrossEntropyConfig, description="Training loss; evaluation always uses plain cross-entropy"
    )
    eval_harness: EvalHarnessConfig | None = changeable(None, description="Benchmarks during training; null: none")
    eval_harness_steps: int = changeable(
        10_000, ge=1, description="Interval of the benchmarks in steps; they also run after the last step"
    )

    @field_validator("data", "model", "trainer", "optimizer", "objective")
    @classmethod
    def _of_a_known_class(cls, section: BaseModel, info: ValidationInfo) -> BaseModel:
        """Convert a subclass with other defaults to its base: the identity of a run must not depend on the class."""
        known = sections_of(cls.model_fields[str(info.field_name)].annotation)
        return as_base(section, next(base for base in type(section).__mro__ if base in known))

    @model_validator(mode="after")
    def _parts_fit(self) -> "RunConfig":
        try:
            build_cycles(self.optimizer, self.trainer.num_train_steps)
        except PydanticCustomError as error:
            context = error.context or {}
            raise field_error(f"optimizer.{context['field']}", context["message"]) from None
        if self.data.has_positions and not self.data.mask_across_documents and "alibi" in self.model.attention_needs:
            raise field_error(
                "data.reset_positions",
                f"{self.model.type} uses ALiBi, which has no positions to reset: remove this setting, or set "
                "data.mask_across_documents: true",
            )
        if isinstance(self.objective, WeightedCrossEntropyConfig):
            for name in self.objective.source_weights:
                if name not in (self.data.configs or {}):
                    raise field_error("objective.source_weights", f"unknown source {name!r}: not in data.configs")
        sources = {
            "initialize_from_hf": self.initialize_from_hf,
            "initialize_from_checkpoint_path": self.initialize_from_checkpoint_path,
            "trainer.initialize_from": self.trainer.initialize_from,
        }
        given = [name for name, value in sources.items() if value]
        if len(given) > 1:
            raise field_error(given[0], f"set together with {given[1]}; remove one of them")
        self._check_samples()
        of_run: dict[str, Any] = {"lora": self.lora, "transfer": self.transfer}
        of_run["optimizer.qk_clip"] = getattr(self.optimizer, "qk_clip", None)
        of_run["optimizer.type"] = "sophia-h" if self.optimizer.hessian == "hutchinson" else None
        for name, reason in self.model.obstacles.items():
            if of_run[name] is not None:
                raise field_error(name, reason)
        self._check_lora()
        self._check_objective(given)
        self._check_transfer()
        self._check_groups()
        if self.use_hf_model_config and not self.initialize_from_hf:
            raise field_error("use_hf_model_config", "requires initialize_from_hf, which is not set")
        if self.epoch and self.data.configs is not None:
            raise field_error("epoch", "unsupported for a mixture; set data.stop_strategy: first_exhausted instead")
        for batch in self.trainer.batch_sizes.all:
            try:
                num_microbatches(batch, self.trainer.per_device_parallelism)
            except ValueError as error:
                raise field_error("trainer.per_device_parallelism", str(error)) from None
        return self

    def _check_samples(self) -> None:
        """Raise an error for samples that no model of this length could continue."""
        trainer = self.trainer
        if trainer.sample_prompts and trainer.sample_length >= self.model.seq_len:
            raise field_error(
                "trainer.sample_length",
                f"{trainer.sample_length} tokens after a prompt do not fit into model.seq_len {self.model.seq_len}",
            )

    def _check_objective(self, given: list[str]) -> None:
        """Raise an error for settings that do not fit the objective. `given` names what training starts from."""
        objective = self.objective
        kind = objective.type
        if objective.needs_pairs != self.data.has_pairs:
            raise field_error(
                "objective.type",
                f"{kind} compares answers; set data.format: {{type: preference}}"
                if objective.needs_pairs
                else f"{kind} cannot compare answers (data.format preference); set dpo, orpo or simpo",
            )
        if objective.is_cross_entropy:
            return
        if self.optimizer.hessian is not None:
            raise field_error(
                "optimizer.type",
                f"{self.optimizer.type} estimates the Hessian of a cross-entropy; use another, such as adam",
            )
        if self.z_loss_weight:
            raise field_error("z_loss_weight", f"has no effect with objective {kind}; set it to 0.0")
        if not objective.needs_reference:
            return
        if self.trainer.precision.products is not None:
            raise field_error(
                "trainer.mp",
                f"{kind} compares with log-probabilities of a reference, which has no products in 8 bits; remove q "
                "from it",
            )
        if self.base_quantization is not None:
            raise field_error("lora.base_quantization", f"{kind} needs the exact base as its reference; set it to null")
        if self.trainer.initialize_from:
            raise field_error(
                "trainer.initialize_from",
                "is the complete state of a run, which has no reference; set initialize_from_checkpoint_path",
            )
        if not given:
            raise field_error(
                "objective.type",
                f"{kind} tunes a model, relative to which preferences are learned; set initialize_from_hf or "
                "initialize_from_checkpoint_path",
            )

    def _check_groups(self) -> None:
        """Raise an error for initial values without effect."""
        for name in ("initialize_from_hf", "initialize_from_checkpoint_path"):
            if getattr(self, name) and any(group.initial_std is not None for group in self.optimizer.groups):
                raise field_error("optimizer.groups", f"initial_std has no effect with {name}; remove it")

    def _check_lora(self) -> None:
        """Raise an error for settings that do not fit LoRA."""
        if self.lora is None:
            return
        if self.trainer.initialize_from:
            raise field_error(
                "trainer.initialize_from", "is a run's complete state; with lora, set lora.initialize_from"
            )
        if not (self.initialize_from_hf or self.initialize_from_checkpoint_path):
            raise field_error("lora", "needs a base: set initialize_from_hf or initialize_from_checkpoint_path")
        products = self.trainer.precision.products
        if self.base_quantization is not None and products not in (None, self.base_quantization):
            raise field_error(
                "lora.base_quantization", f"is {self.base_quantization}, but q is {products}; use the same, or remove q"
            )
        if self.model.balance_rate:
            raise field_error("model.moe.bias_update_rate", "is frozen with lora, as routers are; set it to 0.0")
        if self.optimizer.needs_full_matrices:
            raise field_error("optimizer.type", f"{self.optimizer.type} is for complete matrices; use adam with lora")

    def _check_transfer(self) -> None:
        """Raise an error for settings that do not fit the transfer between sizes."""
        if self.transfer is None:
            return
        base_of(self.model, self.transfer.base)
        if self.lora is not None:
            raise field_error("transfer", "adapters have no sizes to transfer between; remove it, or lora")
        if not self.optimizer.transfers:
            raise field_error("optimizer.type", f"{self.optimizer.type} has no transfer rule; use adam, lion or muon")

    @property
    def loss_weights(self) -> dict[str, float] | None:
        """Weight of each source's tokens in the training loss, in the order of the sources; None: all are 1."""
        if not isinstance(self.objective, WeightedCrossEntropyConfig):
            return None
        return {name: self.objective.source_weights.get(name, 1.0) for name in self.data.sources()}

    @property
    def sequence_splits(self) -> list[SequenceSplit]:
        """How devices share a sequence, in each layer and in other mixers of the model; none if they do not.

        Raises `UserError` if a mixer has no rule for it.
        """
        parts = self.trainer.sequence_parts
        if parts == 1:
            return []
        splits = [mixer.split(parts, self.trainer.head_parts) for mixer in self.model.all_mixers]
        if None in splits:
            raise UserError(
                f"trainer.context_axis_size: {parts} devices cannot share a sequence, since some layers of "
                f"{self.model.type} need all of it; remove this setting"
            )
        return [split for split in splits if split is not None]

    def attention_needs(self, trains: bool = True) -> AttentionNeeds:
        """What the run needs of attention; `trains` false: neither dropout nor derivatives are needed."""
        model, features = self.model, self.model.attention_needs
        if self.data.mask_across_documents:
            features.add("segments")
        if self.trainer.precision.compute == "float32":
            features.add("float32")
        if self.optimizer.hessian == "hutchinson":
            features.add("second_derivatives")
        if any(split.has_parts for split in self.sequence_splits):
            features.add("part")
        if not trains:
            features -= {"dropout", "second_derivatives"}
        block_size = model.flash_attention_block_size
        return AttentionNeeds(
            backend=model.attn_backend, features=frozenset(features), seq_len=model.seq_len, block_size=block_size
        )

    @property
    def base_dtype(self) -> str | None:
        """Dtype of the frozen parameters; None without LoRA."""
        return None if self.lora is None else self.lora.base_dtype or self.trainer.precision.params

    @property
    def base_quantization(self) -> str | None:
        """The 8-bit format in which frozen parameters are stored; None: none is."""
        return None if self.lora is None else self.lora.base_quantization

    @property
    def batch_types(self) -> dict[str, str]:
        """Arrays of a training batch, each [rows, seq_len], and their dtypes; see `lmtrain/data/batches.py`."""
        more = {"loss_weights": self.loss_weights is not None, "reference": self.objective.needs_reference}
        return self.data.batch_types | {name: "float32" for name, wanted in more.items() if wanted}


def data_seed(config: RunConfig) -> int:
    """The seed of the order of the data."""
    return config.trainer.seed if config.data_seed is None else config.data_seed


def resolved(config: RunConfig) -> dict[str, Any]:
    """The complete config as plain data, without secrets, as saved with checkpoints and logs."""
    return redact(config.model_dump(mode="json"))


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
    "data.pack": (
        lambda c: any(source.has_targets for source in c.data.sources().values()),
        "conversations, completions or preferences (data.format.type)",
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
    if has_validation or config.eval_harness is not None or trainer.core is not None:
        return
    for name, setting in (
        ("early_stopping", trainer.early_stopping),
        ("checkpointer.keep_best", trainer.checkpointer.keep_best),
    ):
        if setting is not None:
            raise UserError(
                f"trainer.{name}: the run has no evaluation, whose metrics it compares; set data.validation_urls (and "
                "trainer.steps_per_eval), trainer.core, or eval_harness"
            )
