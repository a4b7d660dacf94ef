"""`lmtrain tokenizer train FILES --output PATH`: train a tokenizer on text. `lmtrain tokenizer extend BASE --output
PATH`: add special tokens and a chat template to the tokenizer of an existing model.
"""

import argparse

from lmtrain.commands.arguments import Parser, at_least
from lmtrain.preprocess.learn import INPUT_SENTENCE_SIZE, check_output, existing, holds_another, learn_from_files
from lmtrain.preprocess.prepare_demo import VOCAB_SIZE
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log, start_console_log

_TRAIN = """\
Train a tokenizer on text and save it as a folder for data.tokenizer, which AutoTokenizer loads too.

kinds:
  bpe            byte-level BPE, as in GPT-2; trained on all of the text
  sentencepiece  as in Llama: no normalization, split digits, <unk> <s> </s>, byte fallback; trained on at most
                 --input_sentence_size lines. The folder also gets tokenizer.model; for a PATH that ends in .model
                 only that file is written."""

_EXTEND = """\
Add special tokens and a chat template to the tokenizer of an existing model, and save it as a folder.

The ids of BASE stay the same, and new tokens follow. The tokens <|name|> that the template writes are added, too, and
the one that ends a reply becomes the EOS token. Initialized from the model, a run extends its embeddings by new rows,
each the mean of the others.

  lmtrain tokenizer extend my_base_model --chat_template chatml --output my_chat_tokenizer"""

_ACTIONS = "`lmtrain tokenizer train FILES --output PATH` or `lmtrain tokenizer extend BASE --output PATH`"


def run(argv: list[str]) -> int:
    actions = {"train": (_train_parser, _train), "extend": (_extend_parser, _extend)}
    if argv and argv[0] in ("-h", "--help"):
        for make_parser, _ in actions.values():
            make_parser().print_help()
        return 0
    if not argv or argv[0] not in actions:
        raise UserError(f"lmtrain tokenizer: expected {_ACTIONS}")
    make_parser, act = actions[argv[0]]
    act(make_parser().parse_args(argv[1:]))
    return 0


def _train(arguments: argparse.Namespace) -> None:
    from lmtrain.hf.sentencepiece import MIN_VOCABULARY

    is_bpe = arguments.kind == "bpe"
    for name in ("model_type", "input_sentence_size"):
        if is_bpe and getattr(arguments, name) is not None:
            raise UserError(f"--{name}: requires --kind sentencepiece")
    check_output(arguments.output, arguments.kind)
    smallest = (257 if is_bpe else MIN_VOCABULARY) + len(arguments.special_tokens)
    if arguments.vocab_size < smallest:
        kind = "byte-level" if is_bpe else "sentencepiece"
        raise UserError(f"--vocab_size {arguments.vocab_size}: a {kind} vocabulary has at least {smallest} entries")
    if not arguments.overwrite and existing(arguments.output) is not None:
        log.info(f"{arguments.output}: a tokenizer exists; without --overwrite, a different one is an error")
    start_console_log()
    count = learn_from_files(
        arguments.files,
        arguments.text_key,
        arguments.vocab_size,
        arguments.output,
        arguments.overwrite,
        arguments.special_tokens,
        None if is_bpe else arguments.model_type or "bpe",
        arguments.input_sentence_size or INPUT_SENTENCE_SIZE,
    )
    log.info(f"{arguments.output}: tokenizer with {count:,} entries")


def _train_parser() -> Parser:
    parser = Parser("tokenizer train", _TRAIN)
    add = parser.add_argument
    add("files", nargs="+", metavar="FILES", help="text files; formats, braces and globs as in data.train_urls")
    add("--output", required=True, metavar="PATH", help="folder to write, or a *.model file")
    add("--kind", choices=["bpe", "sentencepiece"], default="bpe", help="kind of tokenizer (default: bpe)")
    add("--vocab_size", type=int, default=VOCAB_SIZE, help=f"vocabulary size in tokens (default: {VOCAB_SIZE})")
    _add_special_tokens(parser, "special tokens to reserve, such as those of a chat template")
    _add_overwrite(parser)
    add("--text_key", default="text", help="key of the text in each record (default: text)")
    add("--model_type", choices=["bpe", "unigram"], help="sentencepiece model type (default: bpe, as in Llama)")
    add(
        "--input_sentence_size",
        type=at_least(1),
        metavar="LINES",
        help="maximum number of lines that sentencepiece trains on, a fixed sample spread evenly over all text; a line "
        f"of more than 1000 characters counts as several. Limits memory (default: {INPUT_SENTENCE_SIZE})",
    )
    return parser


def _extend(arguments: argparse.Namespace) -> None:
    if not arguments.special_tokens and arguments.chat_template is None:
        raise UserError("lmtrain tokenizer extend: --special_tokens or --chat_template is required")
    check_output(arguments.output, None)
    start_console_log()

    from lmtrain.hf.extend_tokenizer import extend_tokenizer

    extended = extend_tokenizer(arguments.base, arguments.special_tokens, arguments.chat_template)
    if not extended.save(arguments.output, arguments.overwrite):
        raise holds_another(arguments.output)
    new = ", ".join(f"{token} {number}" for token, number in extended.new.items())
    entries = f"{extended.backend.get_vocab_size():,} entries"
    log.info(
        f"{arguments.output}: {entries}, {f'of which new: {new}' if new else 'none of them new'}; EOS {extended.eos}"
    )


def _extend_parser() -> Parser:
    from lmtrain.hf.extend_tokenizer import TEMPLATES

    parser = Parser("tokenizer extend", _EXTEND)
    add = parser.add_argument
    add("base", metavar="BASE", help="the tokenizer: a folder, a model's folder, a file or a hub id, as data.tokenizer")
    add("--output", required=True, metavar="PATH", help="folder to write")
    add(
        "--chat_template",
        metavar="TEMPLATE",
        help=f"{' or '.join(TEMPLATES)}, or a Jinja file; becomes the default chat template",
    )
    _add_special_tokens(parser, "special tokens to add, besides those of the chat template")
    _add_overwrite(parser)
    return parser


def _add_special_tokens(parser: Parser, help: str) -> None:
    example = "'<|im_start|>,<|im_end|>'"
    parser.add_argument(
        "--special_tokens", type=_special_tokens, metavar="TOKEN,...", default=[], help=f"{help}: {example}"
    )


def _add_overwrite(parser: Parser) -> None:
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="overwrite an existing tokenizer; caches and runs made with it do not work with the new one",
    )


def _special_tokens(text: str) -> list[str]:
    tokens = [token.strip() for token in text.split(",") if token.strip()]
    if repeated := next((token for token in tokens if tokens.count(token) > 1), None):
        raise argparse.ArgumentTypeError(f"{repeated} is listed more than once")
    if unbalanced := next((token for token in tokens if token.count("[") != token.count("]")), None):
        raise argparse.ArgumentTypeError(f"{unbalanced} has a single bracket; write tokens with commas, without [ ]")
    return tokens
