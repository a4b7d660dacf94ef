"""What a run refuses before it reads data or uses devices: preparing the data may take hours."""

from contextlib import ExitStack

from lmtrain.checkpoint.discovery import find_checkpoints, list_checkpoints
from lmtrain.config.errors import errors_of
from lmtrain.evaluation.benchmarks.check import check_benchmarks
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.lora.peft import check_adapter_config
from lmtrain.run.config import RunConfig
from lmtrain.run.masked import require_secrets
from lmtrain.run.run import Run
from lmtrain.run.without_effect import without_effect
from lmtrain.runtime.logging import log, nothing_logged
from lmtrain.runtime.processes import Processes
from lmtrain.tracking.open import check_trackers


def check_settings(run: Run) -> None:
    """Raise `UserError` for settings that are refused without a connection to other processes."""
    config = run.config
    require_secrets(run.loaded, trains=True)
    if config.lora is not None and not list_checkpoints(run.checkpoints):  # a run that resumes ignores it
        check_adapter_config(config.lora)
    if config.eval_harness is not None:
        check_benchmarks(config.eval_harness)


def check_services(config: RunConfig, processes: Processes) -> None:
    """Raise `UserError` for trackers and uploads that cannot work here; warn of settings that may be mistakes."""
    if processes.is_first:
        check_trackers(config.trainer.tracker)
        if config.hf_upload is not None:
            from lmtrain.hf.upload import check_upload

            check_upload(config.hf_upload)
    for text in without_effect(config).values():
        log.warning(text)
    if config.lora is None and "lora" in config.model_fields_set:
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
