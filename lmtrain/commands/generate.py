"""`lmtrain generate (CONFIG | --hf REF) --prompt TEXT`: sample from a checkpoint or a Hugging Face model."""

import math

from lmtrain.commands.arguments import Parser, add_checkpoint_flag, add_hf_flag, add_run_flag, parse_run
from lmtrain.config.errors import UserError
from lmtrain.generation.prompt import encode_prompt
from lmtrain.runtime.logging import log, start_console_log
from lmtrain.train.start.hf_model import config_of, resolve_hf
from lmtrain.train.start.trained_model import TrainedModel, from_checkpoint, from_hf


def run(argv: list[str]) -> int:
    parser = Parser("generate", "Sample text from a checkpoint; the text goes to standard output.")
    parser.add_argument("--prompt", required=True, help="text to continue")
    add_run_flag(parser)
    add_checkpoint_flag(parser)
    add_hf_flag(parser)
    parser.add_argument(
        "--max_new_tokens", type=int, default=128, help="maximum number of tokens to generate (default: 128)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="sampling temperature; 0 takes the most likely token (default: 0.8)",
    )
    parser.add_argument(
        "--top_k", type=int, default=50, help="sample from the N most likely tokens; 0: all (default: 50)", metavar="N"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed; the same seed gives the same text (default: 0)"
    )
    arguments, run = parse_run(parser, argv, needs_config=lambda arguments: arguments.hf is None)
    if arguments.max_new_tokens < 1:
        raise UserError(f"--max_new_tokens {arguments.max_new_tokens}: expected 1 or more")
    if not math.isfinite(arguments.temperature):
        raise UserError(f"--temperature {arguments.temperature}: expected a finite number")
    if arguments.temperature < 0 or arguments.top_k < 0 or arguments.seed < 0:
        raise UserError("--temperature, --top_k and --seed cannot be negative")
    start_console_log()
    if arguments.hf is None:
        trained = from_checkpoint(resolve_hf(run, arguments.checkpoint), arguments.checkpoint)
    else:
        trained = _from_hf(arguments.hf, arguments.checkpoint, given=bool(run.loaded.path))
        log.info(f"sampling from {trained.source}")
    ids = encode_prompt(trained.tokenizer, arguments.prompt, "--prompt")
    seq_len = trained.config.model.seq_len
    room = seq_len - len(ids)
    if room < 1:
        raise UserError(f"--prompt: its {len(ids)} tokens fill the model's context of {seq_len} tokens; shorten it")
    if arguments.max_new_tokens > room:
        log.info(f"--max_new_tokens: reduced to {room}, the rest of the model's context of {seq_len} tokens")

    import jax

    from lmtrain.generation.sample import SamplingSettings, sample

    settings = SamplingSettings(min(arguments.max_new_tokens, room), arguments.temperature, arguments.top_k)
    model, params, _ = trained.load()
    prompt = jax.numpy.asarray(ids, jax.numpy.int32)
    tokenizer = trained.tokenizer
    new = sample(model, params, prompt, jax.random.key(arguments.seed), settings, tokenizer.eos_id)
    if not new:
        log.info("no text generated: the first token was end-of-text; try another --seed")
    print(arguments.prompt + tokenizer.backend.decode(new))
    return 0


def _from_hf(ref: str, checkpoint: str | None, given: bool) -> TrainedModel:
    if checkpoint is not None:
        raise UserError("--hf and --checkpoint: choose one")
    if given:
        raise UserError("--hf: cannot be combined with CONFIG; remove CONFIG")
    config = config_of(ref)
    if "tokenizer" not in config.data.model_fields_set:
        raise UserError(f"--hf {ref}: no tokenizer in this repository")
    return from_hf(ref, config)
