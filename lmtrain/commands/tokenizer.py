"""`lmtrain tokenizer train FILES --output FOLDER`: learn a tokenizer from text."""

from lmtrain.commands.arguments import Parser
from lmtrain.config.errors import UserError
from lmtrain.preprocess.prepare_demo import VOCAB_SIZE, learn_from_files
from lmtrain.runtime.logging import log, start_console_log


def run(argv: list[str]) -> int:
    parser = Parser("tokenizer train", "Learn a byte-level BPE tokenizer and save it as a folder AutoTokenizer loads.")
    parser.add_argument("files", nargs="+", metavar="FILES", help="JSONL files; braces and globs as in data.train_urls")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="folder to write")
    parser.add_argument("--kind", choices=["bpe"], default="bpe", help="kind of tokenizer (default: bpe)")
    parser.add_argument("--vocab_size", type=int, default=VOCAB_SIZE, help=f"entries (default: {VOCAB_SIZE})")
    parser.add_argument("--text_key", default="text", help="key of the text in each line (default: text)")
    if argv and argv[0] in ("-h", "--help"):
        parser.print_help()
        return 0
    if not argv or argv[0] != "train":
        raise UserError("lmtrain tokenizer: expected `lmtrain tokenizer train FILES --output FOLDER`")
    arguments = parser.parse_args(argv[1:])
    if arguments.vocab_size < 257:
        raise UserError(f"--vocab_size {arguments.vocab_size}: a byte-level vocabulary has at least 257 entries")
    start_console_log()
    count = learn_from_files(arguments.files, arguments.text_key, arguments.vocab_size, arguments.output)
    log.info(f"{arguments.output}: a tokenizer of {count:,} entries")
    return 0
