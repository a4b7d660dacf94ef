"""`lmtrain generate (CONFIG | --hf REF) (--prompt TEXT | --chat)`: sample from a model, or talk to it."""

import argparse
import io
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lmtrain.commands.arguments import Parser, add_model_flags, at_least, check_model_flags, parse_run
from lmtrain.hf.chat_template import ChatTemplate, find_template
from lmtrain.hf.tokenizer import encode_prompt
from lmtrain.preprocess.documents import read_texts
from lmtrain.run.run import require_secrets
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log, start_console_log
from lmtrain.runtime.signals import StopRequest
from lmtrain.runtime.text import require_utf8
from lmtrain.weights.trained_model import TrainedModel, from_checkpoint, from_hf

if TYPE_CHECKING:
    from lmtrain.generation.decode import SamplingSettings

_CLEAR, _EXIT = "/clear", "/exit"

# name of the option, type, default, what its value stands for, meaning
_SAMPLING: tuple[tuple[str, Callable[[str], Any], float, str, str], ...] = (
    ("max_new_tokens", at_least(1), 128, "N", "maximum number of tokens to generate"),
    ("temperature", at_least(0, float), 0.8, "T", "sampling temperature; 0 takes the most likely token"),
    ("top_k", at_least(0), 50, "N", "sample from the N most likely tokens; 0: all"),
    ("top_p", at_least(0, float), 1.0, "P", "sample from the most likely tokens of this total probability; 1: all"),
    ("seed", at_least(0), 0, "N", "random seed; the same seed gives the same text"),
)


def run(argv: list[str]) -> int:
    parser = Parser("generate", "Sample text from a checkpoint; the text goes to standard output.")
    parser.add_argument("--prompt", help="text to continue; with --chat the first message")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="texts to continue: .jsonl with the key prompt, or .txt with one in each line; the result is JSON lines",
    )
    parser.add_argument(
        "--samples",
        type=at_least(1),
        default=1,
        metavar="N",
        help="texts for each prompt (default: 1); several are JSON lines",
    )
    parser.add_argument(
        "--chat", action="store_true", help="talk to the model: each line is a message; /clear starts again, /exit ends"
    )
    parser.add_argument(
        "--web",
        action="store_true",
        help="--chat in the browser, and for clients of OpenAI's API, at 127.0.0.1; Ctrl-C ends it",
    )
    parser.add_argument("--port", type=at_least(0), metavar="N", help="port of --web (default: 8080; 0: any free one)")
    parser.add_argument(
        "--parallel",
        type=at_least(1),
        metavar="N",
        help="replies of --web that are written at once, each with a KV cache (default: 4)",
    )
    parser.add_argument(
        "--speculative",
        action="store_true",
        help="the text of --temperature 0 in fewer passes, by the guesses of model.mtp",
    )
    parser.add_argument("--system", metavar="TEXT", help="system message of --chat")
    parser.add_argument(
        "--chat_template",
        metavar="FILE",
        help="chat template of --chat: a Jinja file, or the name of a tokenizer's template (default: that of the "
        "training data, else the tokenizer's own)",
    )
    add_model_flags(parser)
    for name, kind, default, metavar, meaning in _SAMPLING:
        meaning += f" (default: {default:g})"
        parser.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=meaning)
    arguments, run = parse_run(parser, argv, needs_config=lambda arguments: arguments.hf is None)
    require_secrets(run.loaded)
    if arguments.prompt is None and arguments.prompts is None and not arguments.chat:
        parser.error("--prompt, --prompts or --chat is required")
    if arguments.prompts is not None and (arguments.prompt is not None or arguments.chat):
        raise UserError(f"--prompts and --{'chat' if arguments.chat else 'prompt'}: choose one")
    if arguments.samples > 1 and arguments.chat:
        raise UserError("--samples: a --chat has one reply to each message")
    if arguments.speculative and (arguments.chat or arguments.prompts is not None or arguments.samples > 1):
        raise UserError("--speculative: continues one --prompt; remove --chat, --prompts and --samples")
    if arguments.speculative and arguments.temperature != 0:
        raise UserError(f"--speculative: the text is that of --temperature 0, not of {arguments.temperature:g}; set it")
    if arguments.web and (not arguments.chat or arguments.prompt is not None):
        raise UserError(
            "--web: "
            + ("write the first message in the browser; remove --prompt" if arguments.chat else "requires --chat")
        )
    for flag in ("port", "parallel"):
        if getattr(arguments, flag) is not None and not arguments.web:
            raise UserError(f"--{flag}: requires --web")
    prompts = _read_prompts(arguments.prompts) if arguments.prompts is not None else []
    if not arguments.chat and (arguments.system is not None or arguments.chat_template is not None):
        raise UserError(f"--{'system' if arguments.system is not None else 'chat_template'}: requires --chat")
    for flag in ("prompt", "system"):
        require_utf8(getattr(arguments, flag) or "", f"--{flag}")
    start_console_log()
    check_model_flags(arguments)
    if arguments.hf is None:
        trained = from_checkpoint(run, arguments.checkpoint, arguments.average)
    elif run.loaded.path:
        raise UserError("--hf: cannot be combined with CONFIG; remove CONFIG")
    else:
        trained = from_hf(arguments.hf)
        log.info(f"sampling from {trained.source}")
    if arguments.chat:
        _chat(arguments, trained)
    elif prompts or arguments.samples > 1:
        _continue_all(arguments, prompts or [arguments.prompt], trained)
    else:
        _continue(arguments, trained)
    return 0


# Rows that are continued at once.
_ROWS = 16


def _read_prompts(path: str) -> list[str]:
    """The prompts of a file. Raises `UserError` with the line of one that cannot be read."""
    prompts = [str(text) for text in read_texts(path, "prompt") if str(text).strip()]
    if not prompts:
        raise UserError(f"--prompts {path}: has no prompt")
    return prompts


def _continue_all(arguments: argparse.Namespace, prompts: list[str], trained: TrainedModel) -> None:
    """Print each prompt with its continuations as JSON lines."""
    import jax
    import numpy as np

    from lmtrain.generation.decode import build_batch_sampler, pad_prompts, until_eos

    tokenizer, seq_len = trained.tokenizer, trained.config.model.seq_len
    bos = starts_with_bos(trained)
    ids = [encode_prompt(tokenizer, prompt, "--prompts", bos) for prompt in prompts]
    longest = max(range(len(ids)), key=lambda number: len(ids[number]))
    room = seq_len - len(ids[longest])
    if room < 1:
        raise UserError(f"prompt {longest + 1}: its {len(ids[longest])} tokens fill the model's context of {seq_len}")
    if arguments.max_new_tokens > room:
        log.info(f"--max_new_tokens: reduced to {room}, since the longest prompt leaves no more of the model's context")
    settings = sampling_settings(arguments, min(arguments.max_new_tokens, room))
    model, params, layout = trained.load()
    sample = build_batch_sampler(model, layout, str(jax.tree.leaves(params)[0].dtype), settings)
    rows = [number for number in range(len(prompts)) for _ in range(arguments.samples)]
    size = min(_ROWS, len(rows)) + -min(_ROWS, len(rows)) % layout.num_batch_shards
    tokens, lengths = pad_prompts([ids[number] for number in rows], size)
    for start in range(0, len(rows), size):  # all of one shape, which is compiled once
        seed = np.uint32((arguments.seed + (start // size << 16)) % 2**32)  # other numbers for each batch
        new = np.asarray(sample(params, tokens[start : start + size], lengths[start : start + size], seed))
        for at, number in enumerate(rows[start : start + size], start):
            text = tokenizer.backend.decode(until_eos(new[at - start].tolist(), tokenizer.eos_id))
            found = {"prompt": prompts[number], "sample": at % arguments.samples, "text": text}
            print(json.dumps(found, ensure_ascii=False), flush=True)


def sampling_settings(arguments: argparse.Namespace, count: int) -> "SamplingSettings":
    """The settings of the flags, for `count` new tokens."""
    from lmtrain.generation.decode import SamplingSettings

    return SamplingSettings(count, arguments.temperature, arguments.top_k, arguments.top_p)


def _continue(arguments: argparse.Namespace, trained: TrainedModel) -> None:
    """Print the prompt with its continuation."""
    ids = encode_prompt(trained.tokenizer, arguments.prompt, "--prompt", starts_with_bos(trained))
    if arguments.speculative and getattr(trained.config.model, "mtp", None) is None:
        raise UserError("--speculative: requires a model that predicts further tokens (model.mtp); remove it")
    seq_len = trained.config.model.seq_len
    room = seq_len - len(ids)
    if room < 1:
        raise UserError(f"--prompt: its {len(ids)} tokens fill the model's context of {seq_len} tokens; shorten it")
    if arguments.max_new_tokens > room:
        log.info(f"--max_new_tokens: reduced to {room}, the rest of the model's context of {seq_len} tokens")

    import jax

    from lmtrain.generation.decode import sample, until_eos

    settings = sampling_settings(arguments, min(arguments.max_new_tokens, room))
    model, params, _ = trained.load()
    prompt = jax.numpy.asarray(ids, jax.numpy.int32)
    tokenizer = trained.tokenizer
    if arguments.speculative:
        from lmtrain.generation.speculative import decode_with_guesses

        found = decode_with_guesses(model, params, prompt, settings.max_new_tokens)
        new = until_eos(found.tokens, tokenizer.eos_id)
        log.info(f"{len(found.tokens)} tokens in {found.passes + 1} passes of the model")
    else:
        new = sample(model, params, prompt, jax.random.key(arguments.seed), settings, tokenizer.eos_id)
    if not new:
        log.info("no text generated: the first token was end-of-text; try another --seed")
    print(arguments.prompt + tokenizer.backend.decode(new))


def starts_with_bos(trained: TrainedModel) -> bool:
    """Whether prompts start with the BOS token: as the run's documents do, or as transformers does it for the model."""
    tokenizer = trained.tokenizer
    if trained.origin is not None or tokenizer.library is None:
        return trained.config.data.enforce_bos
    return tokenizer.bos_id is not None and tokenizer.added_ids[0] == [tokenizer.bos_id]


def _chat(arguments: argparse.Namespace, trained: TrainedModel) -> None:
    """Print a reply to each message, or serve replies with --web. Raises `UserError` if the tokenizer has no chat
    template."""
    tokenizer = trained.tokenizer
    if tokenizer.library is None:
        raise UserError(f"--chat: conversations are texts, but the tokenizer is {tokenizer.path}")
    template = trained.chat_template
    if template is None or arguments.chat_template is not None:
        template = find_template(tokenizer.path, arguments.chat_template, "--chat_template")
    template.check()
    if arguments.web:
        _serve(arguments, trained, template)
        return

    from lmtrain.generation.chat import Chat

    settings = sampling_settings(arguments, arguments.max_new_tokens)
    model, params, _ = trained.load()
    seq_len = trained.config.model.seq_len
    chat = Chat(model, params, tokenizer, template, seq_len, settings, arguments.seed, arguments.system)
    for number, message in enumerate(_messages(arguments.prompt), start=1):
        if message == _CLEAR:
            chat.clear()
            continue
        try:
            require_utf8(message, f"message {number}")
            for piece in chat.say(message):
                print(piece, end="", flush=True)
            print(flush=True)
        except UserError as error:
            log.error(str(error))


def _serve(arguments: argparse.Namespace, trained: TrainedModel, template: ChatTemplate) -> None:
    """Serve replies until a signal."""
    from lmtrain.generation.chat import ChatEncoder
    from lmtrain.generation.engine import Engine
    from lmtrain.generation.server import ChatServer, Replies

    encoder = ChatEncoder(trained.tokenizer, template, arguments.system)
    port = 8080 if arguments.port is None else arguments.port
    with ChatServer(trained.source, port, arguments.system) as server:
        model, params, _ = trained.load()
        engine = Engine(model, params, trained.config.model.seq_len, arguments.parallel or 4)
        log.info("compiling")
        settings = sampling_settings(arguments, arguments.max_new_tokens)
        server.replies = Replies(engine, encoder, settings, arguments.seed)
        with StopRequest("ending the server") as stop:
            threading.Thread(target=server.serve_forever, name="server", daemon=True).start()
            log.info(f"chat: {server.url}/   OpenAI's API: {server.url}/v1   Ctrl-C ends it")
            while not stop.requested:
                time.sleep(0.1)
            server.shutdown()


def _messages(first: str | None) -> Iterator[str]:
    """Messages from standard input until its end, with a prompt on a terminal."""
    if first is not None:
        yield first
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a bad line is refused, and the next one is read
    asks = sys.stdin.isatty()
    while True:
        if asks:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == _EXIT:
            return
        if line.strip():
            yield line.strip()
