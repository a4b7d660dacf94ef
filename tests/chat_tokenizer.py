"""A small tokenizer with a chat template, and conversations."""

import json
from pathlib import Path

from conftest import TOKENIZER
from tokenizers import Tokenizer

# ChatML, with and without marks of what the assistant writes.
MARKED = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who counts the café?"},
    {"role": "assistant", "content": "The robot."},
    {"role": "user", "content": "And the stars?"},
    {"role": "assistant", "content": "Nobody counts the stars."},
]


def write_chat_tokenizer(folder: Path, template: str | None = PLAIN) -> Path:
    """Copy the tests' tokenizer, and add the special tokens of ChatML and a template. -> the folder"""
    folder.mkdir(parents=True, exist_ok=True)
    backend = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = json.loads((TOKENIZER / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def write_chats(path: Path, conversations: list[list[dict]], **more: object) -> Path:
    """Write conversations as a .jsonl file. -> the path"""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"messages": messages, **more}) + "\n" for messages in conversations))
    return path
