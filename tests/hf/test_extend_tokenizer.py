"""Adding special tokens and a chat template to a tokenizer; byte-level BPE, trained on text."""

import json
import shutil

import pytest
from chat_tokenizer import CONVERSATION, MARKED, PLAIN
from conftest import TOKENIZER, VALIDATION_FILES

from lmtrain.hf.chat_template import TemplateError, find_template
from lmtrain.hf.extend_tokenizer import END_OF_TEXT, extend_tokenizer, learn_bpe
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.hf.sentencepiece import train_sentencepiece
from lmtrain.preprocess.documents import read_texts
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import log

TEXTS = [*read_texts(VALIDATION_FILES[0], "text"), " a\n\n  b\t🙂 <|endoftext|> </s>"]
BOS = "<|endoftext|>"
# The conversation as each shipped template writes it.
WRITTEN = {
    "chatml": BOS + "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CONVERSATION),
    "llama3": BOS
    + "".join(f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n{m['content']}<|eot_id|>" for m in CONVERSATION),
}
REPLIES = {"chatml": "<|im_start|>assistant\n", "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n"}
ENDS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>"}


@pytest.fixture
def extended(tmp_path):
    """Extend a tokenizer and save it. -> its folder"""

    def extend(template, base=TOKENIZER, tokens=()):
        folder = str(tmp_path / "new")
        assert extend_tokenizer(str(base), tokens, template).save(folder, overwrite=False)
        return folder

    return extend


@pytest.mark.parametrize("name", ["chatml", "llama3"])
def test_a_shipped_template_writes_the_same_text_and_tokens_here_and_in_transformers(extended, name):
    from transformers import AutoTokenizer

    folder = extended(name)
    ours, theirs = open_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    template = find_template(folder, None, "data.format.chat_template")
    rendered = template.render(CONVERSATION)
    assert rendered.text == theirs.apply_chat_template(CONVERSATION, tokenize=False) == WRITTEN[name]
    asked = template.render(CONVERSATION[:2], add_generation_prompt=True).text
    assert asked == theirs.apply_chat_template(CONVERSATION[:2], tokenize=False, add_generation_prompt=True)
    assert asked.endswith(REPLIES[name])
    answers = [m["content"] + ENDS[name] for m in CONVERSATION if m["role"] == "assistant"]
    assert [rendered.text[start:end] for start, end in rendered.generated] == answers
    ids = ours.backend.encode(rendered.text, add_special_tokens=False).ids
    assert ids == theirs.apply_chat_template(CONVERSATION, return_dict=False)
    assert ours.eos_id == theirs.eos_token_id == theirs.convert_tokens_to_ids(ENDS[name])
    assert ids.count(ours.eos_id) == len(CONVERSATION)
    assert theirs.decode(ids, skip_special_tokens=True).count("<|") == 0
    with pytest.raises(TemplateError, match="message 2"):  # has no text
        template.render([CONVERSATION[1], {"role": "assistant", "tool_calls": []}])


def test_ids_of_the_base_stay_the_same_and_new_ones_follow(extended):
    base, new = open_tokenizer(str(TOKENIZER)), open_tokenizer(extended("chatml", tokens=["<tool>", "<|im_end|>"]))
    added = [new.backend.token_to_id(token) for token in ("<tool>", "<|im_end|>", "<|im_start|>")]
    assert added == [base.vocab_size, base.vocab_size + 1, base.vocab_size + 2]
    assert new.bos_id == base.bos_id
    for text in TEXTS:
        assert new.backend.encode(text).ids == base.backend.encode(text).ids


def test_a_second_extension_adds_nothing(extended, tmp_path):
    again = extend_tokenizer(extended("chatml"), ["<|im_end|>"], "chatml")
    assert again.new == {}
    assert again.save(str(tmp_path / "again"), overwrite=False)
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("new", "again")]
    assert files[0] == files[1]


def test_without_a_template_the_eos_token_and_the_templates_stay(extended, tmp_path):
    folder = extended(None, base=extended_with_settings(tmp_path, chat_template=PLAIN, pad_token="<|endoftext|>"))
    settings = json.loads((tmp_path / "new" / "tokenizer_config.json").read_text())
    assert [settings[name] for name in ("eos_token", "pad_token", "chat_template")] == [BOS, BOS, PLAIN]
    assert open_tokenizer(folder).eos_id == open_tokenizer(str(TOKENIZER)).eos_id


def extended_with_settings(folder, **settings):
    """A copy of the tests' tokenizer with further settings. -> its folder"""
    shutil.copytree(TOKENIZER, folder / "base")
    path = folder / "base" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder / "base"


def test_a_named_template_of_the_base_is_kept(extended, tmp_path):
    named = [{"name": "default", "template": PLAIN}, {"name": "marked", "template": MARKED}]
    folder = extended("llama3", base=extended_with_settings(tmp_path, chat_template=named))
    assert find_template(folder, "marked", "--chat_template").text == MARKED
    assert "<|eot_id|>" in find_template(folder, None, "--chat_template").text


def test_a_template_without_a_special_end_keeps_the_eos_token_with_a_warning(extended, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(log, "propagate", True)
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
    assert open_tokenizer(extended(str(tmp_path / "mine.jinja"))).eos_id == open_tokenizer(str(TOKENIZER)).eos_id
    assert "no special token after a reply" in caplog.text


def test_tokens_that_a_template_makes_of_roles_are_added(tmp_path):
    path = tmp_path / "phi.jinja"
    path.write_text("{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}")
    extended = extend_tokenizer(str(TOKENIZER), [], str(path))
    assert extended.new.keys() == {"<|end|>", "<|user|>", "<|assistant|>", "<|system|>"}
    assert extended.eos == "<|end|>"


def test_the_folder_of_a_model_is_not_written_to(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    extended = extend_tokenizer(str(TOKENIZER), [], "chatml")
    with pytest.raises(UserError, match="holds a model"):
        extended.save(str(tmp_path), overwrite=True)
    with pytest.raises(UserError, match=r"^--output /proc/x/y: "):
        extended.save("/proc/x/y", overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_sentencepiece_tokenizer_parses_special_tokens_once_it_is_extended(extended, tmp_path):
    from transformers import AutoTokenizer

    model = tmp_path / "base.model"
    model.write_bytes(train_sentencepiece(TEXTS * 20, 400, "bpe", 1000, []))
    base, folder = open_tokenizer(str(model)), extended("chatml", base=model)
    new, theirs = open_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS[:-1]:
        assert new.backend.encode(text).ids == base.backend.encode(text).ids
    text = find_template(folder, None, "--chat_template").render(CONVERSATION).text
    ids = new.backend.encode(text, add_special_tokens=False).ids
    assert ids.count(new.eos_id) == len(CONVERSATION)
    assert theirs.apply_chat_template(CONVERSATION, return_dict=False) == ids


def test_a_fixed_vocabulary_and_ids_with_gaps_are_refused(tmp_path):
    """The library numbers a new token by the number of tokens, which is an id in use if there are gaps."""
    for name in ("byte", "passthrough"):
        with pytest.raises(UserError, match=f"extend {name}: "):
            extend_tokenizer(name, ["<|x|>"], None)
    folder = extended_with_settings(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.__getitem__)
    vocabulary[last] += 1
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="gaps"):
        extend_tokenizer(str(folder), ["<|x|>"], None)


@pytest.mark.parametrize("template", ["{% for m in messages %}", "hello", "{{ raise_exception('never') }}"])
def test_a_template_that_fails_is_refused_with_its_file_and_a_missing_one_names_those_that_are_shipped(
    tmp_path, template
):
    (tmp_path / "bad.jinja").write_text(template)
    with pytest.raises(UserError, match=r"bad\.jinja:1: "):
        extend_tokenizer(str(TOKENIZER), [], str(tmp_path / "bad.jinja"))
    with pytest.raises(UserError, match=r"--chat_template qwen: .*chatml"):
        extend_tokenizer(str(TOKENIZER), [], "qwen")


def test_bpe_has_the_requested_size_restores_any_text_and_merges_frequent_pairs():
    texts = ["one two three two", "two three"] * 50
    tokenizer = learn_bpe(texts, 262, ["<|a|>"])
    assert tokenizer.to_str() == learn_bpe(texts, 262, ["<|a|>"]).to_str()
    assert tokenizer.get_vocab_size() == 262
    assert [tokenizer.token_to_id(token) for token in (END_OF_TEXT, "<|a|>")] == [0, 1]
    text = "naïve — 東京 🚀\r\n\x00 end "
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("two").ids) == 2
