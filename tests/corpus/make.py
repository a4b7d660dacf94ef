"""Make the corpus and the tokenizer that the tests use: `python tests/corpus/make.py`.

The text is our own, put together by a small grammar from a fixed seed, so that it is the same on every machine. The
results are committed; this script is how they came about.
"""

import gzip
import json
import os
import random

from lmtrain.hf.learn_tokenizer import END_OF_TEXT, learn_bpe
from lmtrain.hf.tokenizer import save_tokenizer

HERE = os.path.dirname(os.path.abspath(__file__))

ADJECTIVES = ["quiet", "green", "patient", "hollow", "bright", "narrow", "seventh", "wooden", "distant", "careful"]
NOUNS = ["river", "engine", "garden", "letter", "window", "lantern", "harbour", "teacher", "mountain"]
NOUNS += ["café", "naïve-robot"]
VERBS = ["carries", "follows", "repairs", "remembers", "measures", "paints", "avoids", "answers", "lifts", "counts"]
PLACES = ["under the bridge", "behind the mill", "before noon", "in the north", "after the rain", "beside the 3rd gate"]


def sentence(rng: random.Random) -> str:
    subject = f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    text = f"{subject} {rng.choice(VERBS)} the {rng.choice(NOUNS)} {rng.choice(PLACES)}"
    return text.capitalize() + rng.choice([".", ".", ".", "!", "?"])


def document(rng: random.Random) -> str:
    return " ".join(sentence(rng) for _ in range(rng.randint(1, 30)))


def main() -> None:
    rng = random.Random(20240501)
    files = {"train.1.jsonl": 90, "train.2.jsonl.gz": 60, "train.3.jsonl": 50, "validation.jsonl": 20}
    texts: list[str] = []
    for name, count in files.items():
        documents = [document(rng) for _ in range(count)]
        lines = "".join(
            json.dumps({"text": text, "id": i}, ensure_ascii=False) + "\n" for i, text in enumerate(documents)
        )
        content = lines.encode()
        with open(os.path.join(HERE, name), "wb") as file:
            file.write(gzip.compress(content, mtime=0) if name.endswith(".gz") else content)
        if name.startswith("train"):
            texts += documents
    save_tokenizer(learn_bpe(texts, 384), os.path.join(HERE, "tokenizer"), eos=END_OF_TEXT, bos=END_OF_TEXT)


if __name__ == "__main__":
    main()
