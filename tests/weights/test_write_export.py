"""Export of a Hugging Face folder: its pieces and settings, the gathered tensors, and complete or not at all."""

import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest
import tokenizers
from chat_tokenizer import MARKED, write_chat_tokenizer
from conftest import CORPUS, TOKENIZER
from safetensors.numpy import load_file
from sentencepiece import SentencePieceProcessor
from transformers import AutoTokenizer

import lmtrain
from lmtrain.hf.chat_template import ChatTemplate
from lmtrain.hf.extend_tokenizer import extend_tokenizer
from lmtrain.hf.key_map import Piece, Row
from lmtrain.hf.sentencepiece import train_sentencepiece
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.storage import list_names, read_bytes
from lmtrain.weights import write_export as module
from lmtrain.weights.compare_export import check_ids
from lmtrain.weights.write_export import Export, write_export

TENSORS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3) / 7, "b": np.ones(3, np.float32)}
CONFIG = {"model_type": "gpt2"}


def write(
    folder, dtype: str = "float32", tokenizer=TOKENIZER, template=None, generation=None, kind="gpt2", **options
) -> None:
    pieces = [
        Piece(name=name, shape=tensor.shape, rows=(Row(name, name),), index=None) for name, tensor in TENSORS.items()
    ]
    export = Export(
        pieces=pieces,
        config={"model_type": kind},
        extra_files={"code.py": b"print()"},
        tokenizer=load_tokenizer(str(tokenizer)),
        dtype=dtype,
        seq_len=128,
        max_length=128,
        chat_template=template,
        generation=generation or {},
    )
    write_export(str(folder), export, TENSORS.values(), **options)


def test_the_folder_holds_weights_configs_and_tokenizer(tmp_path):
    write(tmp_path / "model")
    files = ["code.py", "config.json", "generation_config.json", "model.safetensors"]
    files += ["tokenizer.json", "tokenizer_config.json"]
    assert (tmp_path / "model" / "code.py").read_bytes() == b"print()"
    (tmp_path / "plain").touch()  # has the permissions of the umask
    assert {path.stat().st_mode for path in (tmp_path / "model").iterdir()} == {(tmp_path / "plain").stat().st_mode}
    assert sorted(os.listdir(tmp_path / "model")) == files
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert {name: tensor.tobytes() for name, tensor in found.items()} == {n: t.tobytes() for n, t in TENSORS.items()}
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config == CONFIG | {"dtype": "float32", "torch_dtype": "float32", "lmtrain_version": lmtrain.__version__}


@pytest.mark.parametrize(("given", "written"), [(1e30, 128), (512, 512)])
def test_the_tokenizer_gets_the_models_length_unless_it_has_one(tmp_path, given, written):
    shutil.copytree(TOKENIZER, tmp_path / "tok")
    path = tmp_path / "tok" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": given}))
    write(tmp_path / "model", tokenizer=tmp_path / "tok")
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == written


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        (None, "gpt2"),
        ({"tokenizer_class": "LlamaTokenizer"}, "gpt2"),
        ({"tokenizer_class": "Unknown"}, "gpt2"),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "qwen2"),
    ],
)
def test_transformers_reads_the_tokenizer_of_an_export_with_the_same_ids(tmp_path, settings, kind):
    """Without a class, with Llama's, or next to a Qwen2, it would replace rules of tokenizer.json by other ones."""
    library = tokenizers.Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Digits(individual_digits=True), tokenizers.pre_tokenizers.ByteLevel(use_regex=False)]
    )
    library.normalizer = tokenizers.normalizers.NFKC()
    (tmp_path / "tok").mkdir()
    library.save(str(tmp_path / "tok" / "tokenizer.json"))
    if settings is not None:
        (tmp_path / "tok" / "tokenizer_config.json").write_text(json.dumps(settings))
    write(tmp_path / "model", tokenizer=tmp_path / "tok", kind=kind)
    ours = load_tokenizer(str(tmp_path / "tok"))
    for trusted in (False, True):
        theirs = AutoTokenizer.from_pretrained(tmp_path / "model", trust_remote_code=trusted)
        for text in ("def f(x1234): return 12", " lead", "\ufb01n <|endoftext|>a"):
            ids = ours.backend.encode(text, add_special_tokens=False).ids
            assert theirs.encode(text, add_special_tokens=False) == ids
        assert theirs.model_max_length == 128
    check_ids(str(tmp_path / "model"), ours)
    write(tmp_path / "model")  # replaces all of its files


def test_a_tokenizer_that_differs_in_transformers_is_an_error_of_the_verification(tmp_path):
    ours = load_tokenizer(str(TOKENIZER))
    write(tmp_path / "model")
    with pytest.raises(UserError, match="Some text, 1234"):
        check_ids(str(tmp_path / "model"), load_tokenizer(str(write_chat_tokenizer(tmp_path / "other"))))
    check_ids(str(tmp_path / "model"), ours)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_sentencepiece_model_travels_with_the_tokens_that_were_added_to_it(tmp_path, kind):
    """As llama.cpp reads it: pieces by their number, then added_tokens.json, then added_tokens_decoder."""
    texts = [line["text"] for line in map(json.loads, (CORPUS / "validation.jsonl").read_text().splitlines())]
    (tmp_path / "spm.model").write_bytes(train_sentencepiece(texts, 330, kind, 1000))
    extended = extend_tokenizer(str(tmp_path / "spm.model"), ["<|tool|>"], "chatml")
    assert extended.save(str(tmp_path / "tok"), overwrite=False)
    write(tmp_path / "model", tokenizer=tmp_path / "tok")
    model = SentencePieceProcessor(model_file=str(tmp_path / "model" / "tokenizer.model"))
    tokens = {number: model.id_to_piece(number) for number in range(model.get_piece_size())}
    more = json.loads((tmp_path / "model" / "added_tokens.json").read_text())
    assert more == {"<|tool|>": 330, "<|im_start|>": 331, "<|im_end|>": 332}
    tokens |= {number: text for text, number in more.items()}
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    decoder = {int(number): token["content"] for number, token in settings["added_tokens_decoder"].items()}
    ours = load_tokenizer(str(tmp_path / "tok"))
    assert tokens == tokens | decoder == {number: ours.backend.id_to_token(number) for number in range(333)}
    assert settings["add_bos_token"] is settings["add_eos_token"] is False
    assert load_tokenizer(str(tmp_path / "model")).identity == ours.identity
    check_ids(str(tmp_path / "model"), ours)


def test_a_sentencepiece_model_with_other_ids_is_left_out(tmp_path, caplog):
    shutil.copytree(TOKENIZER, tmp_path / "tok")
    (tmp_path / "tok" / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")  # as Llama 3 has one
    write(tmp_path / "model", tokenizer=tmp_path / "tok")
    assert not (tmp_path / "model" / "tokenizer.model").exists()
    assert "tokenizer.model" in caplog.text


def generation_of(folder):
    return json.loads((folder / "generation_config.json").read_text())


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (MARKED, [385, 0]),  # <|im_end|>, which is not the EOS token of this tokenizer
        ("{{ raise_exception('never') }}", 0),
    ],
)
def test_generation_of_a_chat_model_ends_at_the_token_after_a_reply(tmp_path, template, ends):
    write(tmp_path / "model", tokenizer=write_chat_tokenizer(tmp_path / "tok"), template=ChatTemplate(template))
    assert generation_of(tmp_path / "model")["eos_token_id"] == ends


def test_settings_of_generation_of_the_initial_model_are_kept(tmp_path, caplog):
    theirs = {"eos_token_id": [0, 5, 6], "pad_token_id": 7, "temperature": 0.6, "top_p": 0.9, "max_length": 4096}
    tokenizer, template = write_chat_tokenizer(tmp_path / "tok"), ChatTemplate(MARKED)
    write(tmp_path / "model", tokenizer=tokenizer, template=template, generation=theirs)
    kept = {**theirs, "eos_token_id": [385, 0, 5, 6], "bos_token_id": 0, "max_length": 128}
    assert generation_of(tmp_path / "model") == kept
    write(tmp_path / "model", generation={"eos_token_id": [0, 9999], "pad_token_id": -1, "bos_token_id": "x"})
    assert generation_of(tmp_path / "model") == {"eos_token_id": 0, "bos_token_id": 0, "max_length": 128}
    for unknown in ("9999", "-1"):
        assert unknown in caplog.text


def test_an_earlier_export_is_replaced_and_bfloat16_is_rounded_to_nearest(tmp_path):
    write(tmp_path / "model")
    (tmp_path / "model" / "model-00001-of-00002.safetensors").write_text("from before")
    write(tmp_path / "model", "bfloat16")
    assert not (tmp_path / "model" / "model-00001-of-00002.safetensors").exists()
    found = load_file(tmp_path / "model" / "model.safetensors")
    np.testing.assert_array_equal(found["a"], TENSORS["a"].astype(ml_dtypes.bfloat16))


def test_a_symbolic_link_to_a_folder_is_kept(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "model.safetensors").exists()
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]


def test_a_failed_write_keeps_the_earlier_export_and_leaves_no_other_files(tmp_path, monkeypatch):
    write(tmp_path / "model")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(module, "write_json", fail)
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path / "model", "bfloat16")
    assert os.listdir(tmp_path) == ["model"]
    assert load_file(tmp_path / "model" / "model.safetensors")["a"].dtype == np.float32


@pytest.mark.parametrize("scheme", ["local", "memory"])
def test_weights_that_read_back_differently_are_an_error(tmp_path, monkeypatch, scheme):
    read = module.read_tensor
    monkeypatch.setattr(module, "read_tensor", lambda path, info: read(path, info) + 1)
    output = str(tmp_path / "model") if scheme == "local" else "memory://damaged/model"
    with pytest.raises(OSError, match="checksum mismatch"):
        write(output)
    assert list_names(str(tmp_path)) == list_names("memory://damaged") == []


def test_several_files_have_an_index_as_transformers_writes_it(tmp_path):
    write(tmp_path / "model", shard_bytes=20)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 36, "total_parameters": 9}, "weight_map": {"a": first, "b": second}}
    np.testing.assert_array_equal(load_file(tmp_path / "model" / first)["a"], TENSORS["a"])
    np.testing.assert_array_equal(load_file(tmp_path / "model" / second)["b"], TENSORS["b"])


def test_a_url_gets_the_same_files_and_a_later_export_replaces_all_earlier_files(tmp_path):
    write(tmp_path / "model")
    write("memory://bucket/models/one", shard_bytes=20)
    write("memory://bucket/models/one")
    assert list_names("memory://bucket/models") == ["one"]
    assert list_names("memory://bucket/models/one") == sorted(os.listdir(tmp_path / "model"))
    for name in os.listdir(tmp_path / "model"):
        assert read_bytes(f"memory://bucket/models/one/{name}") == (tmp_path / "model" / name).read_bytes()
