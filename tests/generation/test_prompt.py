"""Prompts start as the documents of training do."""

from dataclasses import replace

import pytest
from conftest import TOKENIZER
from tokenizers.processors import TemplateProcessing

from lmtrain.commands.generate import starts_with_bos
from lmtrain.generation.decode import encode_prompt
from lmtrain.hf.tokenizer import load_tokenizer
from lmtrain.run.config import RunConfig
from lmtrain.weights.export_folder import ModelOrigin
from lmtrain.weights.trained_model import TrainedModel


def test_a_prompt_starts_with_the_bos_token_once_if_documents_do():
    tokenizer = load_tokenizer(str(TOKENIZER))
    bos = tokenizer.bos_id
    ids = encode_prompt(tokenizer, "a text", "--prompt", bos=False)
    assert bos not in ids
    for prompt in ("a text", "<|endoftext|>a text"):
        assert encode_prompt(tokenizer, prompt, "--prompt", bos=True) == [bos, *ids]
    assert encode_prompt(tokenizer, "", "--prompt", bos=False) == [bos]
    without = replace(tokenizer, bos_id=None)
    assert encode_prompt(without, "a text", "--prompt", bos=True) == ids


@pytest.mark.parametrize("adds", [False, True])
def test_that_of_a_run_follows_its_setting_and_that_of_a_hugging_face_model_its_tokenizer(adds):
    tokenizer = load_tokenizer(str(TOKENIZER))
    library = type(tokenizer.library).from_str(tokenizer.library.to_str())
    end = "<|endoftext|>"
    library.post_processor = TemplateProcessing(
        single=f"{end} $A" if adds else "$A", special_tokens=[(end, tokenizer.bos_id)]
    )
    tokenizer = replace(tokenizer, library=library)
    config = RunConfig.model_validate({"data": {"enforce_bos": not adds}})
    model = TrainedModel(source="x", step=None, config=config, tokenizer=tokenizer, get_params=lambda *_: None)
    assert starts_with_bos(model) == adds
    assert starts_with_bos(replace(model, origin=ModelOrigin("run", "data"))) == (not adds)
