"""`lmtrain export-hf CONFIG --output DIR`: write a checkpoint as a folder that `transformers` loads."""

import argparse
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lmtrain.commands.arguments import Parser, add_model_flags, parse_run
from lmtrain.run.config import RunConfig
from lmtrain.run.run import require_secrets
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log, start_console_log
from lmtrain.runtime.storage import is_url
from lmtrain.weights.export_folder import EXPORT_DTYPES, check_output, check_same_run
from lmtrain.weights.hf_config import hf_ref
from lmtrain.weights.trained_model import TrainedModel, from_checkpoint

if TYPE_CHECKING:
    from lmtrain.weights.write_export import Export


def run(argv: list[str]) -> int:
    parser = Parser("export-hf", "Write a checkpoint as a folder that transformers' AutoModelForCausalLM loads.")
    add = parser.add_argument
    add("--output", "--output_dir", metavar="DIR", help="folder or URL to write to")
    add_model_flags(parser, hf=False)
    add(
        "--dtype",
        choices=EXPORT_DTYPES,
        help="data type of the weights (default: hf_save_dtype, else that of the parameters)",
    )
    add("--upload", metavar="REPO", help="also upload to the Hugging Face Hub: owner/name[@branch]")
    add("--merge", action="store_true", help="of a run with LoRA: merge the adapters into the base, in float32")
    add(
        "--base_model",
        metavar="REF",
        help="of a run with LoRA: base_model_name_or_path of the adapters (default: initialize_from_hf)",
    )
    add("--without_mtp", action="store_true", help="leave out the modules that predict further tokens (model.mtp)")
    add("--overwrite", action="store_true", help="overwrite the export of another run")
    add("--verify", action="store_true", help="compare logits with transformers after writing; requires torch")
    arguments, run = parse_run(parser, argv)
    require_secrets(run.loaded)
    start_console_log()
    _check(arguments, run.config)
    output, repository = arguments.output, arguments.upload
    trained = from_checkpoint(run, arguments.checkpoint, arguments.average)
    assert trained.origin is not None
    if output is not None and not arguments.overwrite:
        check_same_run(output, trained.origin)

    from lmtrain.weights.write_export import write_export

    model, params, layout = trained.load()
    export, gather = _build(trained, model, arguments)
    export = replace(export, chat_template=trained.chat_template, generation=trained.generation)
    assert trained.card is not None
    assert trained.step is not None
    export = export.with_card(trained.card, trained.step)

    def write(folder: str) -> None:
        write_export(folder, export, gather(params, layout))

    if output is not None:
        write(output)
        log.info(
            f"{output}: step {trained.step:,}, {export.num_parameters:,} parameters, {export.dtype}; verified by "
            "reading back"
        )
    with tempfile.TemporaryDirectory() as temporary:
        local = output
        if local is None or (is_url(local) and (repository is not None or arguments.verify)):
            local = f"{temporary}/export"
            write(local)
        if arguments.verify:
            from lmtrain.weights.compare_export import build_logits, check_ids, compare_logits

            check_ids(local, trained.tokenizer)
            ours, seq_len = build_logits(model, params, layout), trained.config.model.seq_len
            base = export.config["base_model_name_or_path"] if export.is_adapter else None
            log.info(compare_logits(local, ours, seq_len, export.dtype, base))
        if repository is not None:
            from lmtrain.hf.hub import upload_folder

            url = upload_folder(local, repository, f"{trained.origin.run}, step {trained.step}")
            log.info(f"uploaded: {url}")
    return 0


def _check(arguments: argparse.Namespace, config: RunConfig) -> None:
    """Raise `UserError` for what fails whatever the checkpoint has."""
    output, is_adapter = arguments.output, config.lora is not None and not arguments.merge
    if output is None and arguments.upload is None:
        raise UserError("--output DIR or --upload owner/name is required")
    for flag in ("merge", "base_model"):
        if getattr(arguments, flag) and (config.lora is None or (flag == "base_model" and arguments.merge)):
            raise UserError(f"--{flag}: has an effect only on {'adapters' if config.lora else 'a run with lora'}")
    if arguments.verify:
        from lmtrain.weights.compare_export import require_torch

        require_torch(is_adapter)
        if is_adapter and (arguments.base_model or hf_ref(config)) is None:
            raise UserError("--verify: the base is a checkpoint; export it too, and add --base_model FOLDER")
    if output is not None:
        check_output(output)
        if hf_ref(config) is not None and os.path.realpath(output) == os.path.realpath(str(hf_ref(config))):
            raise UserError(f"--output {output}: is the folder of initialize_from_hf; choose another")
    if arguments.upload is not None:
        from lmtrain.hf.hub import check_upload

        check_upload(arguments.upload)


def _build(trained: TrainedModel, model: Any, arguments: argparse.Namespace) -> tuple["Export", Callable[..., Any]]:
    """The export without its values, and a function from parameters and layout to the values of its pieces."""
    from lmtrain.lora.model import ADAPTERS, AdaptedModel
    from lmtrain.weights.load_checkpoint import gather_merged, gather_tensors
    from lmtrain.weights.write_export import build_adapter_export, build_export

    config, tokenizer, origin = trained.config, trained.tokenizer, trained.origin
    dtype = arguments.dtype or config.hf_save_dtype
    size, exported = model.vocab_size, config.model
    if arguments.without_mtp:
        if getattr(exported, "mtp", None) is None:
            raise UserError("--without_mtp: the model has no modules that predict further tokens (model.mtp)")
        exported = exported.model_copy(update={"mtp": None})
    if isinstance(model, AdaptedModel) and arguments.merge:
        assert config.lora is not None
        of_base = config.lora.base_dtype
        dtype = dtype or (of_base if of_base in EXPORT_DTYPES else "float32")
        export = build_export(exported, model.inner, tokenizer, dtype, origin)
        return export, lambda params, layout: gather_merged(params, model, export.pieces, layout)
    dtype = dtype or config.trainer.precision.params
    if not isinstance(model, AdaptedModel):
        export = build_export(exported, model, tokenizer, dtype, origin)
        return export, lambda params, layout: gather_tensors(params, export.pieces, layout, size)
    base_model = arguments.base_model or hf_ref(config)
    if base_model is None:
        log.info(
            "the base is a checkpoint, so adapter_config.json names no base model: export the base too, and add "
            "--base_model REF"
        )
    export = build_adapter_export(config, model, tokenizer, dtype, origin, base_model)
    return export, lambda params, layout: gather_tensors(params[ADAPTERS], export.pieces, layout, size)
