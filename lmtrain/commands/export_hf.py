"""`lmtrain export-hf CONFIG --output DIR`: write a checkpoint as a folder that `transformers` loads."""

import argparse
import os
import tempfile
from collections.abc import Callable
from typing import Any

from lmtrain.commands.arguments import Parser, add_checkpoint_flag, add_run_flag, parse_run
from lmtrain.config.errors import UserError
from lmtrain.hf.export import DTYPES, Export, check_output, check_same_run, write_export
from lmtrain.runtime.logging import log, start_console_log
from lmtrain.runtime.storage import is_url
from lmtrain.train.start.hf_model import hf_ref, resolve_hf
from lmtrain.train.start.trained_model import TrainedModel, from_checkpoint


def run(argv: list[str]) -> int:
    parser = Parser("export-hf", "Write a checkpoint as a folder that transformers' AutoModelForCausalLM loads.")
    parser.add_argument("--output", "--output_dir", metavar="DIR", help="folder or URL to write to")
    add_run_flag(parser)
    add_checkpoint_flag(parser)
    parser.add_argument(
        "--dtype",
        choices=list(DTYPES),
        help="data type of the weights (default: hf_save_dtype, else that of the parameters)",
    )
    parser.add_argument("--upload", metavar="REPO", help="also upload to the Hugging Face Hub: owner/name[@branch]")
    parser.add_argument(
        "--merge", action="store_true", help="of a run with LoRA: merge the adapters into the base, in float32"
    )
    parser.add_argument(
        "--base_model",
        metavar="REF",
        help="of a run with LoRA: base_model_name_or_path of the adapters (default: initialize_from_hf)",
    )
    parser.add_argument("--overwrite", action="store_true", help="overwrite the export of another run")
    parser.add_argument(
        "--verify", action="store_true", help="compare logits with transformers after writing; requires torch"
    )
    arguments, run = parse_run(parser, argv)
    start_console_log()
    output, repository = arguments.output, arguments.upload
    if output is None and repository is None:
        raise UserError("--output DIR or --upload owner/name is required")
    is_adapter = run.config.lora is not None and not arguments.merge
    for flag in ("merge", "base_model"):
        if getattr(arguments, flag) and (run.config.lora is None or (flag == "base_model" and arguments.merge)):
            raise UserError(f"--{flag}: has an effect only on {'adapters' if run.config.lora else 'a run with lora'}")
    base_model = arguments.base_model or hf_ref(run.config)
    if arguments.verify:
        from lmtrain.hf.compare_logits import require_torch

        require_torch(is_adapter)
        if is_adapter and base_model is None:
            raise UserError("--verify: the base is a checkpoint; export it too, and add --base_model FOLDER")
    if output is not None:
        check_output(output)
        if hf_ref(run.config) is not None and os.path.realpath(output) == os.path.realpath(str(hf_ref(run.config))):
            raise UserError(f"--output {output}: is the folder of initialize_from_hf; choose another")
    if repository is not None:
        from lmtrain.hf.upload import check_upload

        check_upload(repository)
    trained = from_checkpoint(resolve_hf(run, arguments.checkpoint), arguments.checkpoint)
    assert trained.origin is not None
    if output is not None and not arguments.overwrite:
        check_same_run(output, trained.origin)

    model, params, layout = trained.load()
    config = trained.config
    export, gather = _plan(trained, model, arguments)
    dtype, step = export.dtype, trained.step

    def write(folder: str) -> None:
        write_export(folder, export, gather(params, layout))

    if output is not None:
        write(output)
        log.info(f"{output}: step {step:,}, {export.num_parameters:,} parameters, {dtype}; verified by reading back")
    with tempfile.TemporaryDirectory() as temporary:
        local = output
        if local is None or (is_url(local) and (repository is not None or arguments.verify)):
            local = f"{temporary}/export"
            write(local)
        if arguments.verify:
            from lmtrain.hf.compare_logits import compare_logits
            from lmtrain.train.step.step import build_logits

            ours = build_logits(model, params, layout)
            base = export.config["base_model_name_or_path"] if export.is_adapter else None
            log.info(compare_logits(local, ours, config.model.seq_len, dtype, base))
        if repository is not None:
            from lmtrain.hf.upload import upload_folder

            log.info(f"uploaded: {upload_folder(local, repository, f'{trained.origin.run}, step {step}')}")
    return 0


def _plan(trained: TrainedModel, model: Any, arguments: argparse.Namespace) -> tuple[Export, Callable[..., Any]]:
    """The export without its values, and a function from parameters and layout to the values of its pieces."""
    from lmtrain.lora.model import ADAPTERS, AdaptedModel
    from lmtrain.train.start.exporter import plan_export
    from lmtrain.train.start.hf_params import gather_tensors
    from lmtrain.train.start.peft_params import gather_merged, plan_adapter_export

    config, tokenizer, origin = trained.config, trained.tokenizer, trained.origin
    dtype = arguments.dtype or config.hf_save_dtype
    size = model.vocab_size
    if not isinstance(model, AdaptedModel):
        export = plan_export(config.model, model, tokenizer, dtype or config.trainer.precision.params, origin)
        return export, lambda params, layout: gather_tensors(params, export.pieces, layout, size)
    if arguments.merge:
        assert config.lora is not None
        of_base = config.lora.base_dtype
        dtype = dtype or (of_base if of_base in DTYPES else "float32")
        export = plan_export(config.model, model.inner, tokenizer, dtype, origin)
        return export, lambda params, layout: gather_merged(params, model, export.pieces, layout)
    base_model = arguments.base_model or hf_ref(config)
    if base_model is None:
        log.info(
            "the base is a checkpoint, so adapter_config.json names no base model: export the base too, and add "
            "--base_model REF"
        )
    export = plan_adapter_export(config, model, tokenizer, dtype or config.trainer.precision.params, origin, base_model)
    return export, lambda params, layout: gather_tensors(params[ADAPTERS], export.pieces, layout, size)
