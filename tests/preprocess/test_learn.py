"""Files of a trained tokenizer: written completely or not at all, and never in place of another tokenizer unasked."""

import os

import pytest
from conftest import TRAIN_FILES

from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.preprocess.learn import check_output, learn_from_files
from lmtrain.runtime.errors import UserError


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def learn(output, model_type=None, vocab_size=400, overwrite=False):
    return learn_from_files([TRAIN_FILES[0]], "text", vocab_size, output, overwrite, model_type=model_type)


@pytest.mark.parametrize(("model_type", "output"), [("bpe", "tok"), ("bpe", "my.model"), (None, "tok")])
def test_an_existing_tokenizer_is_overwritten_only_with_overwrite(tmp_path, model_type, output):
    """Runs and caches made with it could no longer be used. Repeating the same command changes nothing."""

    def contents():
        files = [path for path in sorted(tmp_path.rglob("*")) if path.is_file() and "cache" not in path.parts]
        return {path.name: path.read_bytes() for path in files}

    learn(output, model_type)
    before = contents()
    assert learn(output, model_type) == 400
    assert contents() == before
    with pytest.raises(UserError, match=f"--output {output}: .* --overwrite"):
        learn(output, model_type, 390)
    assert contents() == before
    learn(output, model_type, 390, overwrite=True)
    assert open_tokenizer(output).vocab_size == 390
    assert contents().keys() == before.keys()


def test_killed_while_writing_leaves_the_model_file_complete_or_missing(monkeypatch):
    learn("tok", "bpe")

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("lmtrain.hf.tokenizer.save_tokenizer", killed)
        with pytest.raises(KeyboardInterrupt):
            learn("tok", "bpe", 300, overwrite=True)
    assert sorted(os.listdir("tok")) == ["tokenizer.model", "tokenizer_config.json"]
    assert open_tokenizer("tok").vocab_size == 300


def test_a_folder_that_cannot_be_written_to_is_refused(monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # tests may run as root, who can write everywhere
    with pytest.raises(UserError, match=r"--output a/b: "):
        check_output("a/b", "sentencepiece")


def test_a_full_disk_is_a_user_error(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lmtrain.preprocess.learn.write_atomically", full)
    with pytest.raises(UserError, match=r"^--output tok: .*No space left on device$"):
        learn("tok", "bpe")
