"""The program of a run, before any arrays exist: model, optimizer, layout of all arrays, and the step."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from lmtrain.config.describe import written
from lmtrain.evaluation.eval_step import build_eval_step
from lmtrain.hf.tokenizer import TextSizes
from lmtrain.lora.model import BASE, AdaptedModel, adapt, trainable
from lmtrain.models.attention.kernel import Choice, choose_attention, log_attention
from lmtrain.models.gated_delta.config import GatedDeltaMixer
from lmtrain.models.gated_delta.devices import choose_delta
from lmtrain.models.interface import LanguageModel
from lmtrain.models.moe.grouped import choose_grouped, kernel_of
from lmtrain.models.params import flatten, parameter_axes, to_storage
from lmtrain.models.registry import build_model
from lmtrain.objectives.cross_entropy import build_objective
from lmtrain.optim.optimizer import build_optimizer
from lmtrain.optim.schedules import build_schedule
from lmtrain.optim.transforms import initial_values
from lmtrain.run.config import RunConfig
from lmtrain.run.trainer import Batching, check_seq_len, choose_batching
from lmtrain.runtime.accelerators import (
    SLOW_FORMATS,
    Accelerator,
    Option,
    find_accelerator,
    refused_option,
    xla_options,
)
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log
from lmtrain.sharding.axes import used_axes
from lmtrain.sharding.mesh import Layout, MeshFunction, build_layout, platform_of
from lmtrain.train.program.out_of_memory import MemoryUse, OutOfMemoryError, device_memory
from lmtrain.train.program.parts import (
    ExpertParts,
    Replicas,
    Teacher,
    build_teacher,
    choose_expert_parts,
    choose_replicas,
)
from lmtrain.train.step.norms import Watch
from lmtrain.train.step.parts import choose_parts
from lmtrain.train.step.state import (
    TEACHER,
    Frozen,
    TrainState,
    build_averaging,
    init_state,
    state_bytes,
    state_shardings,
)
from lmtrain.train.step.step import TrainStep, build_train_step
from lmtrain.transfer.factors import factor_trees

# Signs of an out-of-memory error in XLA's messages.
_SIGNS = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory")


@dataclass(frozen=True, kw_only=True)
class Program:
    """The program of a run. `abstract` and `shardings` are the state's shapes and shardings.

    `train_step` is compiled at its first call. `platform` of the devices: cpu, gpu or tpu. `attention` is the kernel's
    name and the reason for the choice, `replicas` the number of replicas over slices and the reason, `linear` and
    `products` the kernels of linear layers and of experts (None without), `expert_parts` the number of devices that
    split them. `factors` of the transfer
    between sizes: trees like the parameters, see `lmtrain/transfer/factors.py`; None without. `frozen` are the models
    that are not trained, by name; `teacher` that of a distillation, None without.
    """

    config: RunConfig
    model: LanguageModel
    optimizer: Any
    layout: Layout
    batching: Batching
    abstract: TrainState
    shardings: TrainState
    train_step: MeshFunction
    watch: Watch
    platform: str
    attention: Choice
    replicas: Replicas
    linear: Choice | None
    products: Choice | None
    expert_parts: ExpertParts
    factors: Mapping[str, Any] | None
    frozen: Mapping[str, Frozen]
    teacher: Teacher | None = None

    def init(self, given: Mapping[str, Any] | None = None) -> TrainState:
        """A newly initialized state. `given` are parameters of frozen models by name; others are new, too."""
        return init_state(
            self.model,
            self.optimizer,
            self.abstract,
            self.shardings,
            seed=self.config.trainer.seed,
            initial=partial(initial_values, self.config.optimizer),
            factors=self.factors,
            frozen=self.frozen,
            given=given,
        )

    def store(self, path: str, array: jax.Array) -> dict[str, jax.Array]:
        """A parameter of the frozen base as the state stores it, by path. One that is stored in few bits is deleted, so
        that a device never holds two copies of all."""
        base = self.frozen[BASE]
        axes = flatten(parameter_axes(base.model))[path]
        convert = None if base.storage is None else to_storage(path, array.shape, base.storage, axes)
        if convert is None:
            return {path: array}
        shardings = flatten(self.shardings.frozen[BASE])
        out = {name: shardings[name] for name in jax.eval_shape(convert, array)}
        converted: dict[str, jax.Array] = jax.block_until_ready(jax.jit(convert, out_shardings=out)(array))
        array.delete()
        return converted

    def check_products_pay(self) -> None:
        """Raise `UserError` for products in 8 bits that save hardly any time on this run's devices."""
        products, kind = self.config.trainer.precision.products, self.layout.mesh.devices.flat[0].device_kind
        accelerator = find_accelerator(kind)
        if products is None or accelerator is None or self.config.trainer.allow_slow_products:
            return
        if (accelerator.kind, products) in SLOW_FORMATS:
            raise UserError(
                f"trainer.mp: products in {products} save hardly any time on {accelerator.name} (`lmtrain plan` "
                "compares them with 16 bits), and they round more; remove q, or set trainer.allow_slow_products: true"
            )

    def example(self) -> tuple[Any, Any]:
        """An abstract state and the largest batch, each array with its sharding."""
        state = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            self.abstract,
            self.shardings,
        )
        return state, self._batch(max(self.batching.num_microbatches))

    def _batch(self, sequences: int) -> Any:
        shape = (sequences, self.config.model.seq_len)
        return {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=self.layout.batch)
            for name, dtype in self.config.batch_types.items()
        }

    def eval_step(self, sizes: TextSizes | None = None) -> MeshFunction:
        """The evaluation step: (params, batch) -> (summed loss, targets, bytes of their text).

        `sizes` are those of the tokens' texts, if the tokenizer is known.
        """
        precision = self.config.trainer.precision
        return build_eval_step(self.model, self.layout, precision.compute, sizes, self.xla_options)

    def eval_example(self) -> tuple[Any, Any]:
        """Abstract parameters and an abstract evaluation batch, each array with its sharding."""
        state, _ = self.example()
        return state.with_base(state.params), self._batch(self.batching.eval_batch)

    def compile(self) -> Any:
        """The step compiled for its largest batch, without any arrays: has `as_text()` and `memory_analysis()`."""
        return self.train_step.lower(*self.example()).compile()

    @property
    def xla_options(self) -> dict[str, Option]:
        """XLA options for this run's devices."""
        kind = self.layout.mesh.devices.flat[0].device_kind
        return xla_options(self.config.trainer.xla_options, self.platform, kind)

    @property
    def forward_flops_per_token(self) -> tuple[float, float]:
        """FLOPs per token of the forward pass: with full attention, and with causal attention."""
        count = self.config.model.num_flops_per_token
        return count(self.model.vocab_size, causal=False), count(self.model.vocab_size, causal=True)

    @property
    def flops_per_token(self) -> tuple[float, float]:
        """FLOPs per token of forward and backward pass: with full attention, and with causal attention.

        The backward pass has twice those of the forward pass. With LoRA, the frozen weights have no gradients, so that
        only those of attention are counted twice; the adapters' own are not counted. A teacher has a forward pass only.
        """
        full, causal = self.forward_flops_per_token
        if self.config.lora is None:
            total, causal_total = 3 * full, 3 * causal
        else:
            scores, causal_scores = self.config.model.attention_flops(full, causal)
            total, causal_total = 2 * full + scores, 2 * causal + causal_scores
        if self.teacher is None:
            return total, causal_total
        count, tokens = self.teacher.config.num_flops_per_token, self.model.vocab_size
        return total + count(tokens, causal=False), causal_total + count(tokens, causal=True)

    @property
    def experts_in_8_bits(self) -> bool:
        """Whether products of experts have 8 bits in training: if the run has such products and the kernel can."""
        products = self.config.trainer.precision.products
        return self.products is not None and products in kernel_of(self.products.name).formats

    @property
    def rows(self) -> int:
        """The maximum number of sequences that a device computes at once."""
        shards = self.layout.num_batch_shards
        return max(batch // shards // number for batch, number in self.batching.num_microbatches.items())

    @property
    def state_bytes(self) -> dict[str, int]:
        """Bytes per device of each part of the state, stored throughout the run."""
        return state_bytes(self.abstract, self.shardings)

    @property
    def memory_use(self) -> MemoryUse:
        """What is known of the step's memory without compiling it."""
        microbatches = max(self.batching.num_microbatches.values())
        return MemoryUse(
            config=self.config,
            mesh=used_axes(self.layout.mesh.shape),
            rows=self.rows,
            microbatches=microbatches,
            state=self.state_bytes,
        )

    @contextmanager
    def explaining_errors(self) -> Iterator[None]:
        """Convert errors of the compiler or a device into errors that say what to do.

        Raises `OutOfMemoryError`, and `UserError` for an unknown XLA option.
        """
        try:
            yield
        except RuntimeError as error:
            if refused := refused_option(error):
                raise refused from error
            if not any(sign in str(error) for sign in _SIGNS):
                raise
            capacity = device_memory(jax.local_devices()[0])
            raise OutOfMemoryError(self.memory_use.explain(str(error), capacity)) from error


def build_program(
    config: RunConfig,
    vocab_size: int,
    devices: Sequence[Any] | None = None,
    slice_ids: Sequence[int] | None = None,
    accelerator: Accelerator | None = None,
) -> Program:
    """The program of a run on `devices`, by default JAX's. They may belong to a topology that does not exist here.

    `accelerator` is the kind of `devices`, or the one that they stand in for; `slice_ids`: see `build_layout`.

    Raises `UserError` for settings that do not fit the devices.
    """
    trainer = config.trainer
    devices = jax.devices() if devices is None else devices
    accelerator = accelerator or find_accelerator(devices[0].device_kind)
    platform = accelerator.platform if accelerator else platform_of(devices[0])
    kind = accelerator.name if accelerator else devices[0].device_kind
    if accelerator is not None:
        _check_products(trainer.precision.products, accelerator)

    # The models, and how the first one is trained
    teacher = build_teacher(config, vocab_size, platform, kind)
    needs = config.attention_needs()
    attention = choose_attention(needs, platform, kind)
    splits = config.sequence_splits
    exchanged = next((split.text for split in splits if not split.sent_once), None)
    if exchanged:
        attention = attention._replace(reason=f"{attention.reason}; {exchanged}")
    model = adapt(config.lora, config.model, build_model(config.model, vocab_size, attention.name))
    schedule = build_schedule(config.optimizer, trainer.num_train_steps)
    axes = trainable(model, parameter_axes(model))
    factors = factor_trees(config.transfer, config.model, config.optimizer)
    optimizer = build_optimizer(config.optimizer, schedule, axes, factors)
    averaging = build_averaging(trainer.model_averaging)
    frozen = _frozen_models(config, model, teacher)

    # The devices: what each holds of the state and of a batch
    def state_in(layout: Layout) -> tuple[TrainState, TrainState]:
        return state_shardings(model, optimizer, layout, trainer.precision.params, averaging is not None, frozen)

    def size_in(layout: Layout) -> int:
        return sum(state_bytes(*state_in(layout)).values())

    memory = accelerator.memory if accelerator else None
    replicas = choose_replicas(trainer, devices, slice_ids, size_in, memory)
    expert_parts = choose_expert_parts(config, devices, slice_ids, replicas.number, accelerator)
    layout = build_layout(trainer, devices, slice_ids, replicas.number, expert_parts.number)
    batching = choose_batching(trainer, layout.num_batch_shards)
    check_seq_len(config.model.seq_len, trainer.sequence_parts, any(split.needs_even for split in splits))
    products = choose_grouped(platform, devices[0].device_kind) if config.model.mixture else None
    linear = next(
        (
            choose_delta(platform, devices[0].device_kind, bool(splits), trainer.precision.compute, mixer.config)
            for mixer in config.model.mixers
            if isinstance(mixer, GatedDeltaMixer)
        ),
        None,
    )
    _log_choices(devices, layout, replicas, linear, products, expert_parts)
    log_attention(attention, needs, platform)
    abstract, shardings = state_in(layout)

    # The step
    options = xla_options(trainer.xla_options, platform, devices[0].device_kind)
    if options:
        log.info(f"XLA options: {', '.join(f'{name}={written(value)}' for name, value in options.items())}")
    watch = Watch(trainer.watch, axes, model.layers_of_modules())
    step = TrainStep(
        model=model,
        objective=build_objective(config.objective, config.z_loss_weight, config.model.further_losses),
        optimizer=optimizer,
        schedule=schedule,
        num_microbatches=batching.num_microbatches,
        seed=trainer.seed,
        compute_dtype=trainer.precision.compute,
        parts=choose_parts(
            products=trainer.precision.products,
            teacher=teacher.model if teacher else None,
            hessian=config.optimizer.hessian,
            qk_clip=getattr(config.optimizer, "qk_clip", None),
            balance_rate=config.model.balance_rate,
            averaging=averaging,
            watch=watch,
        ),
    )
    return Program(
        config=config,
        model=model,
        optimizer=optimizer,
        layout=layout,
        batching=batching,
        abstract=abstract,
        shardings=shardings,
        train_step=build_train_step(step, layout, shardings, options),
        watch=watch,
        platform=platform,
        attention=attention,
        replicas=replicas,
        linear=linear,
        products=products,
        expert_parts=expert_parts,
        factors=factors,
        frozen=frozen,
        teacher=teacher,
    )


def _frozen_models(config: RunConfig, model: LanguageModel, teacher: Teacher | None) -> dict[str, Frozen]:
    """The models that are not trained, by their names in the state."""
    frozen, precision = {}, config.trainer.precision
    if isinstance(model, AdaptedModel):
        frozen[BASE] = Frozen(model.inner, config.base_dtype or precision.params, config.base_quantization)
    if teacher is not None:
        frozen[TEACHER] = Frozen(teacher.model, precision.compute)
    return frozen


def _log_choices(
    devices: Sequence[Any],
    layout: Layout,
    replicas: Replicas,
    linear: Choice | None,
    products: Choice | None,
    expert_parts: ExpertParts,
) -> None:
    log.info(f"{len(devices)} {devices[0].device_kind} device(s), mesh {used_axes(layout.mesh.shape)}")
    if replicas.reason and len(set(layout.slice_ids)) > 1:
        log.info(f"replica_dcn_axis_size: {replicas.number} ({replicas.reason})")
    if linear:
        log.info(f"linear layers: {linear.name} ({linear.reason})")
    if products:
        log.info(f"experts: {products.name} ({products.reason}), expert_axis_size {expert_parts.described}")


def _check_products(products: str | None, accelerator: Accelerator) -> None:
    """Raise `UserError` for an 8-bit format that the devices do not have."""
    if products is None or products in accelerator.eight_bit:
        return
    faster = [f"q={name}" for name in accelerator.eight_bit]
    instead = f"use {' or '.join(faster)}, or remove q" if faster else "remove q"
    raise UserError(f"trainer.mp: {accelerator.name} has no faster products in {products}; {instead}")
