"""`lmtrain export-hf CONFIG --output DIR`: write a checkpoint as a folder that `transformers` loads."""

from lmtrain.commands.arguments import Parser, parse_run
from lmtrain.commands.checkpoint_model import add_checkpoint_flag, find_model
from lmtrain.hf.export import DTYPES, check_output, write_hf_folder
from lmtrain.runtime.logging import log, start_console_log


def run(argv: list[str]) -> int:
    parser = Parser("export-hf", "Write a checkpoint as a folder that transformers' AutoModelForCausalLM loads.")
    parser.add_argument("--output", "--output_dir", required=True, metavar="DIR", help="folder to write")
    add_checkpoint_flag(parser)
    parser.add_argument(
        "--dtype", choices=list(DTYPES), default="float32", help="type of the weights (default: float32)"
    )
    run = parse_run(parser, argv)
    start_console_log()
    check_output(run.arguments.output)
    found = find_model(run, run.arguments.checkpoint)

    import jax

    from lmtrain.hf.key_map import to_hf
    from lmtrain.models.registry import hf_family

    params = found.load().params
    family = hf_family(run.config.model)
    tokenizer = found.tokenizer
    config = family.to_hf_config(run.config.model, tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id)
    tensors = to_hf(family.table(run.config.model), jax.device_get(params))
    write_hf_folder(run.arguments.output, tensors, config, tokenizer, run.arguments.dtype)
    size = sum(tensor.size for tensor in tensors.values())
    log.info(f"{run.arguments.output}: step {found.checkpoint.step:,}, {size:,} parameters, {run.arguments.dtype}")
    return 0
