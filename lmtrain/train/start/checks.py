"""What a run refuses before it reads data or uses devices (preparing the data may take hours), and its length."""

from contextlib import ExitStack

from lmtrain.checkpoint.discovery import find_checkpoints, list_checkpoints
from lmtrain.data.caches import Caches, check_batch, choose_steps
from lmtrain.evaluation.benchmarks.config import check_benchmarks
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.lora.peft import check_adapter_config
from lmtrain.run.config import RunConfig, data_seed, without_effect
from lmtrain.run.run import ResolvedSettings, Run, require_secrets, resolve
from lmtrain.runtime.errors import UserError, counted, errors_of
from lmtrain.runtime.logging import Processes, log, nothing_logged
from lmtrain.tracking.open import check_trackers


def check_settings(run: Run) -> None:
    """Raise `UserError` for settings that are refused without a connection to other processes."""
    config = run.config
    require_secrets(run.loaded, trains=True)
    if config.lora is not None and not list_checkpoints(run.checkpoints):  # a run that resumes ignores it
        check_adapter_config(config.lora)
    if config.eval_harness is not None:
        check_benchmarks(config.eval_harness)


def check_services(run: Run, processes: Processes) -> None:
    """Raise `UserError` for trackers and uploads that cannot work here; warn of settings that may be mistakes."""
    config = run.config
    if processes.is_first:
        check_trackers(config.trainer.tracker)
        if config.hf_upload is not None:
            from lmtrain.hf.hub import check_upload

            check_upload(config.hf_upload)
    for text in without_effect(config).values():
        log.warning(text)
    if config.lora is None and "lora" in run.loaded.tree.data:
        log.warning("lora: is null, so all parameters are trained; lora: {} trains adapters with the defaults")


def check_before_data(run: Run, data_identity: str, processes: Processes) -> None:
    """Raise `UserError` for all that is refused without data: devices, model, checkpoints and exports.

    `data_identity` is that of the caches.
    """
    from lmtrain.checkpoint.checkpointer import Checkpointer
    from lmtrain.evaluation.samples import encode_prompts
    from lmtrain.sharding.mesh import find_devices
    from lmtrain.train.program.program import build_program
    from lmtrain.train.start.initial_state import own_checkpoint
    from lmtrain.weights.hf_config import check_teacher

    config, trainer = run.config, run.config.trainer
    find_devices()
    check_teacher(config)
    tokenizer = open_tokenizer(config.data.tokenizer, config.data.vocab_size)
    with nothing_logged():  # it is built again after the data, which may end the run earlier
        program = build_program(config, tokenizer.vocab_size)
    program.check_products_pay()
    program.memory_use.check_fits()
    encode_prompts(
        trainer.sample_prompts, trainer.sample_length, tokenizer, config.model.seq_len, config.data.enforce_bos
    )
    with ExitStack() as stack:
        checkpointer = Checkpointer(run.checkpoints, trainer.checkpointer, processes)
        stack.callback(checkpointer.release)
        own = own_checkpoint(config, checkpointer, processes)
    if own is None:
        for setting, path in (
            ("trainer.initialize_from", trainer.initialize_from),
            ("initialize_from_checkpoint_path", config.initialize_from_checkpoint_path),
        ):
            if path is not None:
                with errors_of(setting):
                    find_checkpoints(path)
    if config.hf_save_path is not None or config.hf_upload is not None:
        from lmtrain.train.start.exporter import Exporter
        from lmtrain.weights.export_folder import ModelOrigin

        Exporter(config, ModelOrigin(run.id, data_identity), program.model, tokenizer, program.layout, processes)


def length_of_data(config: RunConfig, caches: Caches) -> ResolvedSettings | None:
    """The number of steps that the data allows, if that ends the run earlier; schedules follow it.

    Raises `UserError` for data smaller than one batch.
    """
    trainer = config.trainer
    check_batch(config.data, caches, config.model.seq_len, trainer.batch_sizes)
    steps = choose_steps(
        config.data,
        caches,
        config.model.seq_len,
        trainer.batch_sizes,
        trainer.num_train_steps,
        config.epoch,
        data_seed(config),
    )
    if steps == trainer.num_train_steps:
        if config.epoch:
            log.info(f"trainer.num_train_steps {steps} ends the run, before or with epoch {config.epoch}")
        return None
    if steps < 1:
        raise UserError("the data is less than one batch; lower trainer.train_batch_size or model.seq_len")
    why = f"epoch {config.epoch}" if config.epoch else "data.stop_strategy first_exhausted"
    log.info(f"{why}: the data ends the run after {counted(steps, 'step')}")
    return ResolvedSettings(f"{why} ({counted(steps, 'step')})", {"trainer": {"num_train_steps": steps}})


def resolve_replicas(run: Run) -> Run:
    """The run with that number. Raises `UserError` if this machine cannot run it."""
    from lmtrain.train.program.program import build_program

    with nothing_logged():
        tokenizer = open_tokenizer(run.config.data.tokenizer, run.config.data.vocab_size)
        replicas = build_program(run.config, tokenizer.vocab_size).replicas
    number = {"trainer": {"replica_dcn_axis_size": replicas.number}}
    return resolve(run, ResolvedSettings(f"auto: {replicas.reason}", number))
