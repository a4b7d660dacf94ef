"""`lmtrain export-hf CONFIG --output DIR`: write a checkpoint as a folder that `transformers` loads."""

import os
import tempfile

from lmtrain.commands.arguments import Parser, add_checkpoint_flag, add_run_flag, parse_run
from lmtrain.config.errors import UserError
from lmtrain.hf.export import DTYPES, check_output, check_same_run, write_export
from lmtrain.runtime.logging import log, start_console_log
from lmtrain.runtime.storage import is_url
from lmtrain.train.start.hf_model import hf_ref, resolve_hf
from lmtrain.train.start.trained_model import from_checkpoint


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
    parser.add_argument("--overwrite", action="store_true", help="overwrite the export of another run")
    parser.add_argument(
        "--verify", action="store_true", help="compare logits with transformers after writing; requires torch"
    )
    arguments, run = parse_run(parser, argv)
    start_console_log()
    output, repository = arguments.output, arguments.upload
    if output is None and repository is None:
        raise UserError("--output DIR or --upload owner/name is required")
    if arguments.verify:
        from lmtrain.hf.compare_logits import require_torch

        require_torch()
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

    from lmtrain.train.start.exporter import plan_export
    from lmtrain.train.start.hf_params import gather_tensors

    model, params, layout = trained.load()
    config = trained.config
    dtype = arguments.dtype or config.hf_save_dtype or config.trainer.precision.params
    export = plan_export(config.model, model, trained.tokenizer, dtype, trained.origin)
    step = trained.step

    def write(folder: str) -> None:
        write_export(folder, export, gather_tensors(params, export.pieces, layout, model.vocab_size))

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
            log.info(compare_logits(local, ours, config.model.seq_len, dtype))
        if repository is not None:
            from lmtrain.hf.upload import upload_folder

            log.info(f"uploaded: {upload_folder(local, repository, f'{trained.origin.run}, step {step}')}")
    return 0
