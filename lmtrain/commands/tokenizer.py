"""`lmtrain tokenizer train FILES --output PATH`: train a tokenizer on text."""

import argparse

from lmtrain.commands.arguments import Parser
from lmtrain.config.errors import UserError
from lmtrain.preprocess.learn import (
    INPUT_SENTENCE_SIZE,
    check_output,
    existing,
    learn_from_files,
    learn_sentencepiece_from_files,
)
from lmtrain.preprocess.prepare_demo import VOCAB_SIZE
from lmtrain.runtime.logging import log, start_console_log

_DESCRIPTION = """\
Train a tokenizer on text and save it as a folder for data.tokenizer, which AutoTokenizer loads too.

kinds:
  bpe            byte-level BPE, as in GPT-2; trained on all of the text
  sentencepiece  as in Llama: no normalization, split digits, <unk> <s> </s>, byte fallback; trained on at most
                 --input_sentence_size lines. The folder also gets tokenizer.model; for a PATH that ends in .model
                 only that file is written."""


def run(argv: list[str]) -> int:
    parser = _parser()
    if argv and argv[0] in ("-h", "--help"):
        parser.print_help()
        return 0
    if not argv or argv[0] != "train":
        raise UserError("lmtrain tokenizer: expected `lmtrain tokenizer train FILES --output PATH`")
    arguments = parser.parse_args(argv[1:])
    check_output(arguments.output, arguments.kind)
    if not arguments.overwrite and existing(arguments.output) is not None:
        log.info(f"{arguments.output}: a tokenizer exists; without --overwrite, a different one is an error")
    learn = _sentencepiece if arguments.kind == "sentencepiece" else _bpe
    count = learn(arguments)
    log.info(f"{arguments.output}: tokenizer with {count:,} entries")
    return 0


def _parser() -> Parser:
    parser = Parser("tokenizer train", _DESCRIPTION)
    parser.add_argument(
        "files", nargs="+", metavar="FILES", help="text files; formats, braces and globs as in data.train_urls"
    )
    parser.add_argument("--output", required=True, metavar="PATH", help="folder to write, or a *.model file")
    parser.add_argument(
        "--kind", choices=["bpe", "sentencepiece"], default="bpe", help="kind of tokenizer (default: bpe)"
    )
    parser.add_argument(
        "--vocab_size", type=int, default=VOCAB_SIZE, help=f"vocabulary size in tokens (default: {VOCAB_SIZE})"
    )
    parser.add_argument(
        "--special_tokens",
        metavar="TOKEN,...",
        default="",
        help="special tokens to reserve, such as those of a chat template: '<|im_start|>,<|im_end|>'",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="overwrite an existing tokenizer; caches and runs made with it do not work with the new one",
    )
    parser.add_argument("--text_key", default="text", help="key of the text in each record (default: text)")
    parser.add_argument(
        "--model_type", choices=["bpe", "unigram"], help="sentencepiece model type (default: bpe, as in Llama)"
    )
    parser.add_argument(
        "--input_sentence_size",
        type=int,
        metavar="LINES",
        help="maximum number of lines that sentencepiece trains on, a fixed sample spread evenly over all text; a line "
        f"of more than 1000 characters counts as several. Limits memory (default: {INPUT_SENTENCE_SIZE})",
    )
    return parser


def _bpe(arguments: argparse.Namespace) -> int:
    for name in ("model_type", "input_sentence_size"):
        if getattr(arguments, name) is not None:
            raise UserError(f"--{name}: requires --kind sentencepiece")
    special = _special_tokens(arguments.special_tokens)
    fewest = 257 + len(special)
    if arguments.vocab_size < fewest:
        raise UserError(f"--vocab_size {arguments.vocab_size}: a byte-level vocabulary has at least {fewest} entries")
    start_console_log()
    return learn_from_files(
        arguments.files, arguments.text_key, arguments.vocab_size, arguments.output, arguments.overwrite, special
    )


def _special_tokens(text: str) -> list[str]:
    tokens = [token.strip() for token in text.split(",") if token.strip()]
    if repeated := next((token for token in tokens if tokens.count(token) > 1), None):
        raise UserError(f"--special_tokens: {repeated} is listed more than once")
    return tokens


def _sentencepiece(arguments: argparse.Namespace) -> int:
    from lmtrain.hf.sentencepiece import SMALLEST_VOCABULARY

    size, special = arguments.vocab_size, _special_tokens(arguments.special_tokens)
    fewest = SMALLEST_VOCABULARY + len(special)
    if size < fewest:
        raise UserError(f"--vocab_size {size}: a sentencepiece vocabulary has at least {fewest} entries")
    lines = INPUT_SENTENCE_SIZE if arguments.input_sentence_size is None else arguments.input_sentence_size
    if lines < 1:
        raise UserError(f"--input_sentence_size {lines}: expected 1 or more")
    start_console_log()
    return learn_sentencepiece_from_files(
        arguments.files,
        arguments.text_key,
        size,
        arguments.output,
        arguments.model_type or "bpe",
        lines,
        arguments.overwrite,
        special,
    )
