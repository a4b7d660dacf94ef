"""The tokenizer and the chat template of a run, or its copies if the originals have changed or are gone."""

import shutil

import pytest
from chat_tokenizer import MARKED, PLAIN, write_chat_tokenizer
from conftest import TOKENIZER

from lmtrain.config.errors import UserError
from lmtrain.config.load import LoadedConfig
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.run.config import RunConfig
from lmtrain.run.run import Run
from lmtrain.weights.run_tokenizer import kept_tokenizer, template_of, tokenizer_of


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run(data)`: a run with this `data` section, in the test's folder."""
    monkeypatch.chdir(tmp_path)
    return lambda data: Run(LoadedConfig(RunConfig.model_validate({"data": data}), path="one.yaml"), "one")


def test_the_copy_is_used_if_the_original_is_gone_or_has_changed(run, tmp_path, caplog):
    one = run({"tokenizer": "original"})
    identity = load_tokenizer(str(TOKENIZER)).identity
    shutil.copytree(TOKENIZER, "original")
    assert tokenizer_of(one, identity).path.endswith("original")
    shutil.copytree(TOKENIZER, kept_tokenizer(one))
    assert tokenizer_of(one, identity).path.endswith("original")
    shutil.rmtree("original")
    assert tokenizer_of(one, identity).path == kept_tokenizer(one)
    write_chat_tokenizer(tmp_path / "original")  # has more tokens
    assert tokenizer_of(one, identity).path == kept_tokenizer(one)
    assert f"original has changed; using the copy in {kept_tokenizer(one)}" in caplog.text
    assert tokenizer_of(one, {"another": 1}).path.endswith("original")


def test_without_any_tokenizer_the_original_is_named(run):
    with pytest.raises(UserError, match=r"\./nowhere"):
        tokenizer_of(run({"tokenizer": "./nowhere"}), {})


def test_the_template_is_that_of_the_first_source_or_of_the_copy(run, tmp_path, caplog):
    tokenizer = load_tokenizer(str(write_chat_tokenizer(tmp_path / "tokenizer", PLAIN)))
    (tmp_path / "marked.jinja").write_text(MARKED)
    plain, marked = (
        {"train_urls": ["x"], "format": {"type": "chat", **more}} for more in ({}, {"chat_template": "marked.jinja"})
    )
    data = {"tokenizer": "tokenizer", "configs": {"a": marked, "b": plain, "text": {"train_urls": ["y"]}}}
    assert template_of(run(data), tokenizer).text == MARKED
    assert "the sources have several chat templates" in caplog.text
    assert template_of(run({"tokenizer": "tokenizer", **plain}), tokenizer).text == PLAIN
    assert template_of(run({"tokenizer": "tokenizer"}), tokenizer) is None
    one = run({"tokenizer": "tokenizer", **marked})
    (tmp_path / "marked.jinja").unlink()
    assert template_of(one, tokenizer) is None
    shutil.copytree("tokenizer", kept_tokenizer(one))
    assert template_of(one, tokenizer).text == PLAIN
