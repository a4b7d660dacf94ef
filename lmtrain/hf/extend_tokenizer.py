"""Training a byte-level BPE tokenizer, and adding special tokens and a chat template to an existing one."""

import filecmp
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lmtrain.hf.chat_template import (
    DEFAULT_TEMPLATE,
    PROBE,
    ChatTemplate,
    TemplateError,
    check_tokens,
    end_of_turn,
    find_template,
    read_templates,
    spelled_tokens,
)
from lmtrain.hf.find_tokenizer import PASSTHROUGH, open_tokenizer
from lmtrain.hf.special_tokens import SETTINGS_FILE, read_declared, read_settings
from lmtrain.hf.tokenizer import MODEL_FILE, Tokenizer, save_tokenizer
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log
from lmtrain.runtime.storage import read_bytes, write_bytes

# Chat templates that come with lmtrain, in the folder `templates`; both mark what the assistant writes.
TEMPLATES = ("chatml", "llama3")

# Settings of the base that the new tokenizer keeps; the end-of-sequence token may change.
_KEPT = ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "model_max_length")


@dataclass(frozen=True, kw_only=True)
class ExtendedTokenizer:
    """A tokenizer to save: `new` are the ids of tokens that the base does not have. `eos` None: the base has none.
    `model` is the sentencepiece model of the base, whose ids stay the same."""

    backend: "tokenizers.Tokenizer"
    new: Mapping[str, int]
    eos: str | None
    bos: str | None
    templates: Mapping[str, str]
    settings: Mapping[str, str]
    model: bytes | None

    def save(self, output: str, overwrite: bool) -> bool:
        """Write the folder `output`. Returns False if it holds another tokenizer and `overwrite` is not set.

        Raises `UserError` if it holds a model, whose embeddings would have no rows for new tokens, or on failure.
        """
        folder = os.path.expanduser(output)
        if os.path.exists(os.path.join(folder, "config.json")):
            raise UserError(f"--output {output}: holds a model without rows for new tokens; choose another folder")
        try:
            with tempfile.TemporaryDirectory() as temporary:
                self._write(temporary)
                if not overwrite and _differs(folder, temporary):
                    return False
            self._write(folder)
        except OSError as error:
            raise UserError(f"--output {output}: cannot be written: {error.strerror or error}") from None
        return True

    def _write(self, folder: str) -> None:
        os.makedirs(folder, exist_ok=True)
        model = os.path.join(folder, MODEL_FILE)
        if self.model is not None:
            write_bytes(model, self.model)
        elif os.path.exists(model):
            os.remove(model)
        save_tokenizer(self.backend, folder, self.eos, self.bos, templates=self.templates, others=self.settings)


def extend_tokenizer(name: str, special_tokens: Sequence[str], template: str | None) -> ExtendedTokenizer:
    """The tokenizer `name` (any value of `data.tokenizer`) with further special tokens and another default template.

    `template` is one of `TEMPLATES`, a Jinja file, or None. The tokens of the form `<|name|>` that it writes are added,
    too, and the token that it writes after a reply becomes the EOS token. Ids of the base stay the same; new ones
    follow. Raises `UserError` if the tokenizer cannot be extended.
    """
    if name in ("byte", PASSTHROUGH):
        what = "the 256 bytes" if name == "byte" else "the ids of the data"
        raise UserError(
            f"lmtrain tokenizer extend {name}: its vocabulary is {what} and cannot be extended; make a tokenizer with "
            "`lmtrain tokenizer train FILES --special_tokens TOKEN,... --output PATH`"
        )
    base = open_tokenizer(name)
    folder = os.path.expanduser(base.path)
    chat = None if template is None else _find_template(template, folder)
    tokens = list(dict.fromkeys([*special_tokens, *(_tokens_of(chat) if chat else ())]))
    backend, new = _add_tokens(base, tokens)
    named = read_declared(folder).texts
    eos, bos = named.get("eos_token"), named.get("bos_token")
    templates = read_templates(folder)
    if chat is not None:
        extended = Tokenizer(
            path=name,
            library=backend,
            vocab_size=backend.get_vocab_size(),
            eos_id=base.eos_id,
            bos_id=base.bos_id,
            fingerprint="",
        )
        check_tokens(chat, extended, "--chat_template")
        end = end_of_turn(chat, extended)
        if end is None:
            log.warning(
                f"--chat_template {template}: it writes no special token after a reply, so that replies will not end; "
                f"name the one that ends a reply with --special_tokens. The EOS token stays {eos}"
            )
        eos = eos if end is None else backend.id_to_token(end)
        templates |= {DEFAULT_TEMPLATE: chat.text}
    settings = read_settings(folder) | named
    kept = {kind: settings[kind] for kind in _KEPT if settings.get(kind) is not None}
    path = os.path.join(folder, MODEL_FILE)
    model = read_bytes(path) if os.path.isfile(path) else None
    return ExtendedTokenizer(
        backend=backend, new=new, eos=eos, bos=bos, templates=templates, settings=kept, model=model
    )


def _differs(folder: str, other: str) -> bool:
    """Whether two folders hold different tokenizers; False if the first one holds none."""
    if not os.path.exists(os.path.join(folder, "tokenizer.json")):
        return False
    names = ("tokenizer.json", SETTINGS_FILE)
    return len(filecmp.cmpfiles(folder, other, names, shallow=False)[0]) < len(names)


def _find_template(template: str, folder: str) -> ChatTemplate:
    if template in TEMPLATES and not os.path.isfile(template):
        template = str(files("lmtrain.hf").joinpath("templates", f"{template}.jinja"))
    if not os.path.isfile(os.path.expanduser(template)):
        raise UserError(f"--chat_template {template}: no such file; a Jinja file, or {' or '.join(TEMPLATES)}")
    found = find_template(folder, template, "--chat_template")
    found.check()
    return found


def _tokens_of(template: ChatTemplate) -> list[str]:
    """The tokens `<|name|>` in the template's text, and those that it makes of roles. Raises `UserError` if it does not
    write what messages say."""
    texts = [template.text]
    for roles in (("user", "assistant"), ("system", "user", "assistant")):
        messages = [{"role": role, "content": PROBE} for role in roles]
        try:
            texts.append(template.render(messages, add_generation_prompt=True).text)
        except TemplateError:  # such as one that allows no system message; a question with an answer is tried later
            continue
        if texts[-1].count(PROBE) < 2:
            raise UserError(f"{template.place}1: the chat template does not write what messages say")
    return spelled_tokens("".join(texts))


def _add_tokens(base: Tokenizer, tokens: Sequence[str]) -> tuple["tokenizers.Tokenizer", dict[str, int]]:
    """A copy of the library's tokenizer with these special tokens, and the ids of those that are new.

    In the copy a text that spells a special token is encoded as this token, as chat templates need it.
    """
    import tokenizers

    before = base.backend.get_vocab(with_added_tokens=True)
    backend = tokenizers.Tokenizer.from_str(base.backend.to_str())
    backend.encode_special_tokens = False
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in tokens])
    after = backend.get_vocab(with_added_tokens=True)
    new = {token: after[token] for token in tokens if token not in before}
    if any(after.get(token) != number for token, number in before.items()) or len(set(after.values())) < len(after):
        raise UserError(
            f"tokenizer {base.path!r}: its ids have gaps, so that the tokenizers library would give a new token the id "
            "of an existing one"
        )
    return backend, new


END_OF_TEXT = "<|endoftext|>"


def learn_bpe(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = (), show_progress: bool = False
) -> tokenizers.Tokenizer:
    """Train a byte-level BPE as in GPT-2: any text can be encoded, and decoding restores it exactly.

    The vocabulary has `vocab_size` entries (fewer if the text has fewer pairs to merge): the end-of-text token,
    `special_tokens`, the 256 bytes, and the merges, most frequent first.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
