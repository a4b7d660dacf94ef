"""The `lmtrain` program: finds the command, and imports only what that command needs.

Exit codes: 0 done; 2 a user error, with one clear message; 75 stopped by a signal, with all finished work saved; 1
anything else.
"""

import errno
import importlib
import os
import sys
import traceback

from lmtrain import __version__
from lmtrain.runtime.errors import RunError, UserError
from lmtrain.runtime.logging import logging_restored
from lmtrain.runtime.machine import keep_to_cpus
from lmtrain.runtime.output import OutputError, discard_unwritten, standard_streams
from lmtrain.runtime.redact import redact

# command -> (module in lmtrain.commands, what it does)
VERBS = {
    "train": ("train", "train a model, or resume the previous run of this config"),
    "preprocess": ("preprocess", "tokenize text into a token cache"),
    "eval": ("eval", "validation loss of a checkpoint or a Hugging Face model"),
    "export-hf": ("export_hf", "write a checkpoint as a Hugging Face model folder"),
    "generate": ("generate", "sample text from a checkpoint"),
    "plan": ("plan", "memory, communication and speed of a run on any devices; search for settings"),
    "scaling": ("scaling", "a ladder of small runs, and the loss and cost of a large run by its law"),
    "checkpoint": ("checkpoint", "list, inspect and verify checkpoints"),
    "report": ("report", "one HTML page and plots of a run, or of several side by side"),
    "config": ("config", "validate a config, or show it resolved"),
    "doctor": ("doctor", "diagnose this machine: devices, storage, services"),
    "tokenizer": ("tokenizer", "train a tokenizer on text, or add chat tokens to one"),
}


# Resources of the machine that have run out: the command line and its files may be right.
_EXHAUSTED = {
    errno.EMFILE: "this process may open no more files: raise the limit with `ulimit -n 65536`",
    errno.ENFILE: "this machine may open no more files: raise fs.file-max",
    errno.ENOSPC: "disk full: free space, and run the same command again",
    errno.EDQUOT: "disk quota exceeded: free space, and run the same command again",
}
_PATHS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)


def main(argv: list[str] | None = None) -> None:
    """Run a command and exit with its code."""
    with standard_streams(has_result=True):
        code = _main(sys.argv[1:] if argv is None else argv)
    discard_unwritten()
    sys.exit(code)


def _main(argv: list[str]) -> int:
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except (UserError, RunError, OutputError) as error:
        if not isinstance(error, OutputError) or error.has_reader:
            print(f"lmtrain: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except Exception as error:
        code, message = _describe(error)
        print(message or redact(traceback.format_exc()).rstrip(), file=sys.stderr)
        return code


def _run(argv: list[str]) -> int:
    if argv[:1] == ["help"] and argv[1:] and not argv[1].startswith("-"):
        argv = [argv[1], "--help", *argv[2:]]  # lmtrain help train [SECTION]
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        print(f"lmtrain {__version__}")
        return 0
    verb = argv[0]
    if verb not in VERBS:
        from lmtrain.config.spellings import other_names
        from lmtrain.runtime.errors import suggest_name

        if (own := other_names("verbs").get(verb)) is not None:
            raise UserError(f"unknown command {verb!r}; it is `{own}` here")
        hint = suggest_name(verb, VERBS)
        raise UserError(
            f"unknown command {verb!r}; " + (f"did you mean {hint!r}?" if hint else f"one of: {', '.join(VERBS)}")
        )
    _require_usable_folder()
    if verb != "doctor":  # doctor looks for all devices, and reports why there are none
        keep_to_cpus()
    command = importlib.import_module(f"lmtrain.commands.{VERBS[verb][0]}")
    try:
        with logging_restored():
            code: int = command.run(argv[1:])
    except SystemExit as done:  # of --help, and of unknown arguments
        code = int(done.code or 0)
    return code


def _describe(error: Exception) -> tuple[int, str | None]:
    """Exit code and message for a limit of the machine or a path that no command has explained; no message for others.

    Libraries raise errors of their own for such a limit, which have its text or its error as their context.
    """
    chain: list[BaseException] = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None and before not in chain:
        chain.append(before)
    for each in chain:
        for number, advice in _EXHAUSTED.items():
            text = os.strerror(number)
            if (isinstance(each, OSError) and each.errno == number) or text in str(each):
                return 1, redact(f"lmtrain: error: {_place(each)}{text}; {advice}")
    if isinstance(error, OSError) and error.errno in _PATHS and (place := _place(error)):
        return 2, redact(f"lmtrain: error: {place}{os.strerror(error.errno)}")
    return 1, None


def _place(error: BaseException) -> str:
    name = getattr(error, "filename", None)
    return f"{os.fsdecode(name)}: " if isinstance(name, str | bytes) else ""


def _require_usable_folder() -> None:
    """Raise `UserError` for a working folder whose path cannot be written to files that say where a run was."""
    try:
        os.getcwd().encode()
    except FileNotFoundError:
        raise UserError("the working folder was deleted; change to another one") from None
    except UnicodeEncodeError:
        raise UserError("the path of the working folder is not UTF-8; rename it, or change to another one") from None


def usage() -> str:
    """The usage text that `lmtrain` without arguments prints."""
    commands = "\n".join(f"  {verb:<12} {text}" for verb, (_, text) in VERBS.items())
    return f"""usage: lmtrain COMMAND [CONFIG] [--section.field VALUE ...]

{commands}

CONFIG is a YAML file, a URL, or the name of a shipped config such as gpt2_nano.
Any setting can be changed on the command line: --trainer.num_train_steps 100
Run `lmtrain COMMAND --help` for details."""
