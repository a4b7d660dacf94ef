"""Tokenizer training from the documents of files, and writing of the result."""

import os
from collections.abc import Sequence

from lmtrain.hf.tokenizer import MODEL_FILE
from lmtrain.preprocess.documents import read_texts
from lmtrain.preprocess.input_files import expand_urls
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.storage import is_url, write_atomically

_JSON = "tokenizer.json"

# Maximum number of lines to train a sentencepiece model on. More hardly change the vocabulary and need more memory.
INPUT_SENTENCE_SIZE = 1_000_000


def learn_from_files(
    urls: list[str],
    text_key: str,
    vocab_size: int,
    output: str,
    overwrite: bool = False,
    special_tokens: Sequence[str] = (),
    model_type: str | None = None,
    input_sentence_size: int = INPUT_SENTENCE_SIZE,
) -> int:
    """Train a tokenizer on the documents of `urls`, save it at `output`, return its vocabulary size.

    It is a byte-level BPE tokenizer, or a sentencepiece model of `model_type`. `output` is a folder; or the file of the
    sentencepiece model if it ends in `.model`. Raises `UserError` if it has another tokenizer, unless `overwrite`.
    """
    from lmtrain.hf.extend_tokenizer import END_OF_TEXT, learn_bpe
    from lmtrain.hf.sentencepiece import train_sentencepiece
    from lmtrain.hf.tokenizer import save_tokenizer

    texts = (text for url in expand_urls(urls) for text in read_texts(url, text_key))
    before = existing(output)
    if model_type is None:
        backend = learn_bpe(texts, vocab_size, special_tokens)
        is_same = before in (None, backend.to_str(pretty=True).encode())
    else:
        model = train_sentencepiece(texts, vocab_size, model_type, input_sentence_size, special_tokens)
        is_same = before in (None, model)
    if not is_same and not overwrite:
        raise holds_another(output)
    if model_type is None:
        save_tokenizer(backend, output, eos=END_OF_TEXT, bos=END_OF_TEXT)
        return backend.get_vocab_size()
    path = os.path.expanduser(output)
    try:
        if is_model_file(output):
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            write_atomically(path, model)
        else:
            _write_folder(path, model)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written: {error.strerror or error}") from None
    return vocab_size


def holds_another(output: str) -> UserError:
    """The error for an existing tokenizer that differs."""
    return UserError(
        f"--output {output}: holds another tokenizer; caches and runs made with it are incompatible with the new one; "
        "choose another folder, or add --overwrite"
    )


def is_model_file(output: str) -> bool:
    """Whether `output` names a sentencepiece model file."""
    return output.endswith(".model")


def existing(output: str) -> bytes | None:
    """Content of the existing tokenizer: the sentencepiece model, else tokenizer.json; None if there is none."""
    path = os.path.expanduser(output)
    candidates = [path] if is_model_file(output) else [os.path.join(path, name) for name in (MODEL_FILE, _JSON)]
    for candidate in filter(os.path.isfile, candidates):
        with open(candidate, "rb") as file:
            return file.read()
    return None


def check_output(output: str, kind: str | None) -> None:
    """Raise `UserError` if `output` cannot be written; called before any text is read. `kind` None: an extended one."""
    path = os.path.expanduser(output)
    if is_url(output):
        raise UserError(f"--output {output}: URLs are not supported; set a local path")
    if is_model_file(output) and kind != "sentencepiece":
        raise UserError(f"--output {output}: a .model file holds a tokenizer of --kind sentencepiece")
    if os.path.isdir(path) if is_model_file(output) else os.path.isfile(path):
        raise UserError(f"--output {output}: exists and is a {'folder' if os.path.isdir(path) else 'file'}")
    if kind == "bpe" and os.path.exists(os.path.join(path, MODEL_FILE)):
        raise UserError(f"--output {output}: the folder holds a sentencepiece tokenizer; choose another folder")
    parent = os.path.abspath(os.path.dirname(path) if is_model_file(output) else path)
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"--output {output}: {parent} is not a writable folder")


def _write_folder(folder: str, model: bytes) -> None:
    """Write model and tokenizer.json. If interrupted, the folder has no tokenizer.json and its model is converted."""
    from lmtrain.hf.sentencepiece import convert_sentencepiece
    from lmtrain.hf.tokenizer import save_tokenizer

    backend, eos, bos = convert_sentencepiece(model, folder)
    os.makedirs(folder, exist_ok=True)
    if os.path.exists(older := os.path.join(folder, _JSON)):
        os.remove(older)
    write_atomically(os.path.join(folder, MODEL_FILE), model)
    save_tokenizer(backend, folder, eos=eos, bos=bos, special_text=False)
