"""A ladder: the config of its runs, its sizes, and the settings that grow with tokens.

N, the parameters of the law, counts those that multiply a token: all matrices and the head, of experts those that the
token uses. Embeddings that are only looked up have none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lmtrain.config.load import LoadedConfig, load_config
from lmtrain.models.config import ModelConfig
from lmtrain.run.config import RunConfig
from lmtrain.runtime.errors import UserError
from lmtrain.scaling.config import LadderConfig, as_overrides
from lmtrain.transfer.config import sizes_of


def multiplying_parameters(model: ModelConfig, vocab_size: int) -> int:
    """N of a model: half the FLOPs of a forward pass per token, without those of attention scores."""
    full, causal = (model.num_flops_per_token(vocab_size, causal) for causal in (False, True))
    return round((full - model.attention_flops(full, causal)[0]) / 2)


def training_flops(model: ModelConfig, vocab_size: int) -> float:
    """FLOPs of a forward and a backward pass per token, with full attention, as `throughput/mfu` counts them."""
    return 3 * model.num_flops_per_token(vocab_size)


@dataclass(frozen=True)
class Size:
    """A size of the ladder: what it sets in `model`, the model, and N. `label` is its width and depth."""

    settings: Mapping[str, Any]
    model: ModelConfig
    parameters: int

    @property
    def label(self) -> str:
        return f"{self.model.hidden_dim}x{self.model.num_layers}"


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """A ladder with the config of its runs, which includes `config.overrides`. Sizes ascend in N."""

    name: str
    path: str
    config: LadderConfig
    base: LoadedConfig[RunConfig]
    vocab_size: int
    sizes: Sequence[Size]

    @property
    def run(self) -> RunConfig:
        """The config of the runs before the ladder's settings."""
        return self.base.config

    @property
    def batch_size(self) -> int:
        """Sequences per update of the config."""
        return self.run.trainer.batch_sizes.all[0]

    @cached_property
    def rates(self) -> list[float]:
        """The learning rates to try; that of the config without any."""
        return self.config.learning_rates or [self.run.optimizer.learning_rate]

    @property
    def base_sizes(self) -> dict[str, Any] | None:
        """`transfer.base` of other sizes; None without transfer."""
        return sizes_of(self.sizes[0].model) if self.config.transfer else None

    def transfer_of(self, config: RunConfig, is_smallest: bool) -> dict[str, Any]:
        """`transfer` of a run of `config`: the base of other sizes than the smallest, and none without transfer."""
        base = self.base_sizes
        if base is not None and not is_smallest:
            return {"transfer.base": base}
        return {} if config.transfer is None else {"transfer": None}

    @property
    def reference_tokens(self) -> float:
        """Tokens of the smallest size's longest run, for which the settings of the config are."""
        return self.sizes[0].parameters * self.config.tokens_per_parameter[-1]

    def load(self, settings: Mapping[str, Any], what: str) -> RunConfig:
        """The config of a run with these settings. Raises `UserError` that names the ladder and `what`."""
        overrides = as_overrides({**self.config.overrides, **settings})
        try:
            return load_config(RunConfig, self.base.path, overrides).config
        except UserError as error:
            raise UserError(f"{self.path}: {what}: {error}") from None

    def grown(self, tokens: float, rate: float) -> dict[str, Any]:
        """Settings that grow, for a run of this many tokens; `rate` is the learning rate of the smallest size's longest
        run. Those with an exponent of 0 are left to the config, but for the learning rate."""
        growth, decay = self.config.growth, self.run.optimizer.weight_decay
        ratio = tokens / self.reference_tokens
        settings: dict[str, Any] = {}
        if growth.batch_size:
            step = self.batch_size & -self.batch_size  # the largest power of two that divides it: devices divide that
            batch = step * max(1, round(self.batch_size * ratio**growth.batch_size / step))
            settings["trainer.train_batch_size"] = batch
            rate *= (batch / self.batch_size) ** (growth.learning_rate / growth.batch_size)  # of the batch as rounded
        settings["optimizer.learning_rate"] = _rounded(rate)
        if growth.weight_decay and decay:
            settings["optimizer.weight_decay"] = _rounded(decay * ratio**growth.weight_decay)
        return settings


def build_ladder(loaded: LoadedConfig[LadderConfig], base: LoadedConfig[RunConfig], vocab_size: int) -> Ladder:
    """The ladder of a file, with the config that it names. Raises `UserError` for a config that has no ladder."""
    _check_base(loaded.path, base.config)
    if loaded.config.transfer and (reason := base.config.model.obstacles.get("transfer")):
        raise UserError(f"{loaded.path}: transfer: {reason.removesuffix('; remove one')}; set transfer: false")
    ladder = Ladder(
        name=loaded.stem, path=loaded.path, config=loaded.config, base=base, vocab_size=vocab_size, sizes=()
    )
    sizes = []
    for number, size in enumerate(loaded.config.sizes):
        settings = {f"model.{name}": value for name, value in size.items()}
        model = ladder.load(settings, f"sizes[{number}]").model
        sizes.append(Size(settings, model, multiplying_parameters(model, vocab_size)))
    sizes.sort(key=lambda size: size.parameters)
    labels = [size.label for size in sizes]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise UserError(f"{loaded.path}: sizes: two are {twice} (width x depth); one of these must differ")
    return replace(ladder, sizes=sizes)


def check_start(path: str, config: RunConfig) -> None:
    """Raise `UserError` for a run that starts from other than new parameters, or with another length than its steps."""
    starts = "a ladder and its law are for runs from new parameters"
    length = "the length of a run is trainer.num_train_steps"
    wrong = {
        "initialize_from_hf": (config.initialize_from_hf, starts),
        "initialize_from_checkpoint_path": (config.initialize_from_checkpoint_path, starts),
        "trainer.initialize_from": (config.trainer.initialize_from, starts),
        "trainer.load_checkpoint_path": (config.trainer.load_checkpoint_path, starts),
        "lora": (config.lora, starts),
        "epoch": (config.epoch, length),
        "trainer.early_stopping": (config.trainer.early_stopping, length),
        "optimizer.cycles": (config.optimizer.cycles, "a ladder and its law are for one cycle"),
        "optimizer.cycle_length": (config.optimizer.cycle_length, "a ladder and its law are for one cycle"),
    }
    for name, (value, reason) in wrong.items():
        if value:
            raise UserError(f"{path}: config sets {name}: {reason}; remove it")
    if len(config.trainer.batch_sizes.all) > 1:
        raise UserError(f"{path}: config changes trainer.train_batch_size during a run; a ladder needs one batch size")


def _check_base(path: str, config: RunConfig) -> None:
    check_start(path, config)
    checkpointer = config.trainer.checkpointer
    if checkpointer.run_folder("a") == checkpointer.run_folder("b"):
        raise UserError(
            f"{path}: config gives all runs the same folder of checkpoints, {checkpointer.base_path}; remove "
            "trainer.checkpointer.append_run_id_to_base_path"
        )
    if not config.trainer.evaluates:
        raise UserError(f"{path}: config has no evaluation, to which the law is fitted; set trainer.steps_per_eval")


def _rounded(value: float) -> float:
    """Four digits, so that the settings of a run can be read."""
    return float(f"{value:.4g}")
