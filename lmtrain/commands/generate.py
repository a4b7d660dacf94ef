"""`lmtrain generate (CONFIG | --hf REF) (--prompt TEXT | --chat)`: sample from a model, or talk to it."""

import argparse
import math
import sys
from collections.abc import Iterator

from lmtrain.commands.arguments import Parser, add_checkpoint_flag, add_hf_flag, add_run_flag, parse_run
from lmtrain.config.errors import UserError
from lmtrain.generation.prompt import encode_prompt
from lmtrain.hf.chat_template import find_template
from lmtrain.runtime.logging import log, start_console_log
from lmtrain.train.start.hf_model import resolve_hf
from lmtrain.train.start.trained_model import TrainedModel, from_checkpoint, from_hf_alone

_CLEAR, _EXIT = "/clear", "/exit"


def run(argv: list[str]) -> int:
    parser = Parser("generate", "Sample text from a checkpoint; the text goes to standard output.")
    parser.add_argument("--prompt", help="text to continue; with --chat the first message")
    parser.add_argument(
        "--chat", action="store_true", help="talk to the model: each line is a message; /clear starts again, /exit ends"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message of --chat")
    parser.add_argument(
        "--chat_template",
        metavar="FILE",
        help="chat template of --chat: a Jinja file, or the name of a tokenizer's template",
    )
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
    if arguments.prompt is None and not arguments.chat:
        parser.error("--prompt or --chat is required")
    if not arguments.chat and (arguments.system is not None or arguments.chat_template is not None):
        raise UserError(f"--{'system' if arguments.system is not None else 'chat_template'}: requires --chat")
    start_console_log()
    if arguments.hf is None:
        trained = from_checkpoint(resolve_hf(run, arguments.checkpoint), arguments.checkpoint)
    else:
        trained = _from_hf(arguments.hf, arguments.checkpoint, given=bool(run.loaded.path))
        log.info(f"sampling from {trained.source}")
    if arguments.chat:
        _chat(arguments, trained)
    else:
        _continue(arguments, trained)
    return 0


def _continue(arguments: argparse.Namespace, trained: TrainedModel) -> None:
    """Print the prompt with its continuation."""
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


def _chat(arguments: argparse.Namespace, trained: TrainedModel) -> None:
    """Print a reply to each message. Raises `UserError` if the tokenizer has no chat template."""
    tokenizer = trained.tokenizer
    if tokenizer.library is None:
        raise UserError(f"--chat: conversations are texts, but the tokenizer is {tokenizer.path}")
    template = find_template(tokenizer.path, arguments.chat_template, "--chat_template")

    from lmtrain.generation.chat import Chat
    from lmtrain.generation.sample import SamplingSettings

    settings = SamplingSettings(arguments.max_new_tokens, arguments.temperature, arguments.top_k)
    model, params, _ = trained.load()
    seq_len = trained.config.model.seq_len
    chat = Chat(model, params, tokenizer, template, seq_len, settings, arguments.seed, arguments.system)
    for message in _messages(arguments.prompt):
        if message == _CLEAR:
            chat.clear()
            continue
        try:
            for piece in chat.say(message):
                print(piece, end="", flush=True)
            print(flush=True)
        except UserError as error:
            log.error(str(error))


def _messages(first: str | None) -> Iterator[str]:
    """Messages from standard input until its end, with a prompt on a terminal."""
    if first is not None:
        yield first
    asks = sys.stdin.isatty()
    while True:
        if asks:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == _EXIT:
            return
        if line.strip():
            yield line.strip()


def _from_hf(ref: str, checkpoint: str | None, given: bool) -> TrainedModel:
    if checkpoint is not None:
        raise UserError("--hf and --checkpoint: choose one")
    if given:
        raise UserError("--hf: cannot be combined with CONFIG; remove CONFIG")
    return from_hf_alone(ref)
