"""`lmtrain tokenizer train`: the files it writes, and the errors before and after reading."""

import json
import os

import pytest
import sentencepiece
from conftest import TRAIN_FILES, VALIDATION_FILES

from lmtrain.commands import tokenizer
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.preprocess.documents import read_texts
from lmtrain.runtime.errors import UserError

TEXTS = [*read_texts(VALIDATION_FILES[0], "text"), "", " a\n\n  b\t🙂 123"]
SENTENCEPIECE = ["--kind", "sentencepiece", "--vocab_size", "400"]


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Run `lmtrain tokenizer train FILES ...` in the test's folder, without its log."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tokenizer, "start_console_log", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments, files=(TRAIN_FILES[0],)):
        return tokenizer.run(["train", *files, *arguments])

    return run


def test_a_sentencepiece_folder_is_a_tokenizer_here_and_in_transformers(train, tmp_path):
    from transformers import AutoTokenizer

    assert train("--output", "tok", *SENTENCEPIECE) == 0
    assert sorted(os.listdir("tok")) == ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"]
    ours = open_tokenizer("tok")
    assert (ours.vocab_size, ours.bos_id, ours.eos_id) == (400, 1, 2)
    library = sentencepiece.SentencePieceProcessor(model_file="tok/tokenizer.model")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tok")
    for text in TEXTS:
        ids = ours.backend.encode(text, add_special_tokens=False).ids
        assert ids == library.encode(text) == theirs(text)["input_ids"]
        assert ours.backend.decode(ids) == theirs.decode(ids) == text


def test_another_process_and_a_folder_have_the_same_model(train, lmtrain, tmp_path):
    few = [*SENTENCEPIECE, "--input_sentence_size", "60", "--vocab_size", "300", "--model_type", "unigram"]
    done = lmtrain("tokenizer", "train", TRAIN_FILES[0], "--output", "there.model", *few, code=0)
    assert "training on 60 of " in done.stderr
    train("--output", "here.model", *few)
    train("--output", "tok", *few)
    train("--output", "bpe.model", *few[:-2])  # the default, as in Llama
    here, there, in_folder, bpe = (
        (tmp_path / name).read_bytes() for name in ("here.model", "there.model", "tok/tokenizer.model", "bpe.model")
    )
    assert here == there == in_folder != bpe
    assert open_tokenizer("here.model").identity == open_tokenizer("tok").identity


def test_files_are_found_by_braces_and_globs_in_any_format(train, tmp_path):
    documents = [f"{word} " * 200 for word in ("zebra", "quagga", "okapi")]
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": documents[0]}))
    (tmp_path / "b.json").write_text(json.dumps([{"body": documents[1]}]))
    (tmp_path / "c.txt").write_text(documents[2])
    train(
        "--output", "tok", "--text_key", "body", *SENTENCEPIECE, "--vocab_size", "290", files=["{a,b}.json*", "c.txt"]
    )
    backend = open_tokenizer("tok").backend
    assert backend.encode("zebra quagga okapi").tokens == ["▁zebra", "▁quagga", "▁okapi"]


def test_byte_level_bpe_is_still_the_default(train):
    train("--output", "tok", "--vocab_size", "300")
    assert sorted(os.listdir("tok")) == ["tokenizer.json", "tokenizer_config.json"]
    assert open_tokenizer("tok").backend.token_to_id("<|endoftext|>") == 0
    with pytest.raises(UserError, match="holds another tokenizer"):
        train("--output", "tok", "--vocab_size", "290")
    assert train("--output", "tok", "--vocab_size", "290", "--overwrite") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "t", "--vocab_size", "256"], "--vocab_size 256"),
        (["--output", "t", "--special_tokens", "<a>,<b>,<a>"], "<a>"),
        (["--output", "t", "--vocab_size", "258", "--special_tokens", "<a>,<b>"], "259"),
        (["--output", "t", "--model_type", "bpe"], "--model_type: "),
        (["--output", "t.model"], "--output t.model: "),
        (["--output", "gs://b/t"], "--output gs://b/t: "),
        (["--output", "file"], "--output file: "),
        (["--output", "other"], "--output other: "),
        (["--output", "t.model", *SENTENCEPIECE, "--vocab_size", "259"], "260"),
        (["--output", "t", *SENTENCEPIECE, "--vocab_size", "9999"], "vocab_size 9999"),
        (["--output", "t", *SENTENCEPIECE, "--vocab_size", "261"], "vocab_size 261"),
        (["--output", "t", *SENTENCEPIECE, "--text_key", "body"], "'body'"),
        (["--output", "folder.model", *SENTENCEPIECE], "--output folder.model: "),
        (["--output", "file/t.model", *SENTENCEPIECE], "{folder}/file"),
        ([], "--output"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else "",
)
def test_a_user_error_is_one_message_and_writes_nothing(train, tmp_path, arguments, message):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.model").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.model").write_text("")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError) as caught:
        train(*arguments)
    assert message.format(folder=tmp_path) in str(caught.value)
    with pytest.raises(UserError, match=r"none\.jsonl, no\*\.txt"):
        train("--output", "t", files=["none.jsonl", "no*.txt"])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", [["--vocab_size", "300"], SENTENCEPIECE], ids=["bpe", "sentencepiece"])
def test_reserved_special_tokens_are_single_tokens(train, kind):
    assert train("--output", "tok", *kind, "--special_tokens", "<|im_start|>, <|im_end|>") == 0
    ours = open_tokenizer("tok")
    assert ours.vocab_size == int(kind[-1])
    ids = ours.parsing_backend.encode("<|im_start|>a<|im_end|>", add_special_tokens=False).ids
    assert [ids[0], ids[-1]] == [ours.backend.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>")]
    assert len(set(ids)) >= 3
    assert ours.eos_id not in ids
