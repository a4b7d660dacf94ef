"""The tokenizer and the chat template of a run, or its copies if the originals have changed or are gone."""

import json
import shutil

import pytest
from chat_tokenizer import MARKED, PLAIN, write_chat_tokenizer
from conftest import TOKENIZER

from lmtrain.config.load import LoadedConfig
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.run.config import RunConfig
from lmtrain.run.run import Run
from lmtrain.runtime.errors import UserError
from lmtrain.weights.run_files import generation_of, keep_tokenizer, kept_tokenizer, template_of, tokenizer_of


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run(data)`: a run with this `data` section and `more` sections, in the test's folder."""
    monkeypatch.chdir(tmp_path)
    return lambda data, **more: Run(LoadedConfig(RunConfig.model_validate({"data": data, **more}), "one.yaml"), "one")


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
    assert f"using the copy in {kept_tokenizer(one)}" in caplog.text
    assert tokenizer_of(one, {"another": 1}).path.endswith("original")
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
    assert caplog.text  # that the sources have several
    assert template_of(run({"tokenizer": "tokenizer", **plain}), tokenizer).text == PLAIN
    assert template_of(run({"tokenizer": "tokenizer"}), tokenizer) is None
    one = run({"tokenizer": "tokenizer", **marked})
    (tmp_path / "marked.jinja").unlink()
    assert template_of(one, tokenizer) is None
    shutil.copytree("tokenizer", kept_tokenizer(one))
    assert template_of(one, tokenizer).text == PLAIN


def test_settings_of_generation_are_those_of_the_initial_model_or_of_the_copy(run, tmp_path, caplog):
    (tmp_path / "base").mkdir()
    one = run({"tokenizer": "original"}, initialize_from_hf="./base")
    assert generation_of(run({"tokenizer": "original"})) == generation_of(one) == {}
    (tmp_path / "base/config.json").write_text('{"eos_token_id": 7, "pad_token_id": null, "temperature": 3}')
    assert generation_of(one) == {"eos_token_id": 7}
    settings = {"eos_token_id": [0, 5], "pad_token_id": 7, "top_p": 0.9}
    written = {**settings, "_from_model_config": True, "transformers_version": "5.0.0"}
    (tmp_path / "base/generation_config.json").write_text(json.dumps(written))
    assert generation_of(one) == settings
    (tmp_path / "base/generation_config.json").write_text(json.dumps({**written, "max_length": 32}))
    assert generation_of(one) == {**settings, "max_length": 32}
    (tmp_path / "base/config.json").write_text('{"lmtrain_version": "0.1.0"}')  # says where the positions end
    assert generation_of(one) == settings
    other = run({"tokenizer": "original"}, initialize_from_hf="./base", allow_other_tokenizer=True)
    assert generation_of(other) == {"top_p": 0.9}
    shutil.copytree(TOKENIZER, "original")
    keep_tokenizer(one, load_tokenizer("original"))
    shutil.rmtree("base")
    assert generation_of(one) == settings
    assert not caplog.messages
    shutil.rmtree(kept_tokenizer(one))
    assert generation_of(one) == {}
    assert "initialize_from_hf" in caplog.text
