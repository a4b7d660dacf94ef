"""CORE: prompts as nanochat writes them, answers by the loss of their tokens, and mistakes in its files.

`tools/bench/core.py` compares with nanochat's own program.
"""

import json
import random

import jax
import numpy as np
import pytest
import yaml

from lmtrain.evaluation.config import CoreConfig, EvaluationConfig
from lmtrain.evaluation.core import Core, CoreTask, build, examples_of, prompts_of
from lmtrain.runtime.errors import UserError

CHOICES = [{"query": f"Is {n} even?", "choices": ["yes", "no", "who knows"], "gold": n % 3} for n in range(9)]
SCHEMAS = [
    {"context_options": [f"The {n} because the cat", "So the dogs"], "continuation": f"ran {n}", "gold": n % 2}
    for n in range(7)
]
# All choices begin with the same tokens, which count here and do not in a multiple choice.
COMPLETIONS = [
    {"query": f"Line {n}:", "choices": [f"it was {word}" for word in ("a b", "cde", "f g h i")], "gold": n % 3}
    for n in range(9)
]
TEXTS = [{"context": f" one {n} two ", "continuation": "three"} for n in range(6)]


def task(kind: str, shots: int = 0, delimiter: str = " ") -> CoreTask:
    return CoreTask("name", kind, "file", shots, delimiter, 0.0)


def write_bundle(folder, tasks, guessing: str = "25") -> str:
    """`tasks`: (label, kind, items, shots, delimiter)."""
    (folder / "eval_data" / "a").mkdir(parents=True)
    listed = []
    for label, kind, items, shots, delimiter in tasks:
        (folder / "eval_data" / "a" / f"{label}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
        uri = {"label": label, "icl_task_type": kind, "dataset_uri": f"a/{label}.jsonl", "num_fewshot": [shots]}
        listed.append(uri | ({} if delimiter == " " else {"continuation_delimiter": delimiter}))
    (folder / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": listed}))
    rows = "".join(f"{label},x,{guessing}\n" for label, *_ in tasks)
    (folder / "eval_meta_data.csv").write_text(f"Eval Task,Task Category,Random baseline\n{rows}")
    return str(folder)


def test_prompts_have_examples_with_their_answers():
    both = task("multiple_choice", delimiter="\nAnswer: ")
    assert prompts_of(both, CHOICES[0], [CHOICES[1], CHOICES[2]])[1] == (
        "Is 1 even?\nAnswer: no\n\nIs 2 even?\nAnswer: who knows\n\nIs 0 even?\nAnswer: no"
    )
    assert prompts_of(task("schema"), SCHEMAS[1], [SCHEMAS[0]]) == [
        "The 0 because the cat ran 0\n\nThe 1 because the cat ran 1",
        "The 0 because the cat ran 0\n\nSo the dogs ran 1",
    ]
    assert prompts_of(task("language_modeling"), TEXTS[1], [TEXTS[0]]) == [
        "one 0 two three\n\none 1 two",
        "one 0 two three\n\none 1 two three",
    ]


def test_examples_are_those_of_nanochat():
    items = [{"number": number} for number in range(10)]
    found = examples_of(task("schema", shots=3), items, 4)
    expected = random.Random(1238).sample([0, 1, 2, 3, 5, 6, 7, 8, 9], 3)
    assert [each["number"] for each in found] == expected


def test_accuracies_are_those_of_each_prompt_alone(gpt2, tmp_path):
    context, params = gpt2
    backend = context.tokenizer.backend

    def ids(text):
        return [context.tokenizer.eos_id, *backend.encode(text).ids]

    run = jax.jit(lambda rows: jax.nn.log_softmax(context.model.apply({"params": params}, rows)))

    def scores(text):
        tokens = ids(text)[-128:]
        rows = np.zeros((1, 128), np.int32)
        rows[0, : len(tokens)] = tokens
        return np.asarray(tokens), np.asarray(run(rows))[0]

    # a continuation that the model writes itself, where it survives being encoded
    texts = []
    for number in range(400):
        words = f"{number} of them"
        tokens, found = scores(words)
        text = backend.decode([int(found[len(tokens) - 1].argmax())])
        if text.startswith(" ") and ids(words + text)[:-1] == list(tokens):
            texts.append({"context": words, "continuation": text[1:]})
    assert len(texts) > 2
    texts = texts[:3] + TEXTS
    tasks = [
        ("some_choices", "multiple_choice", CHOICES, 2, "\nAnswer: "),
        ("some_completions", "completion", COMPLETIONS, 1, " "),
        ("some_schemas", "schema", SCHEMAS, 1, " "),
        ("some_texts", "language_modeling", texts, 0, " "),
    ]
    core = build(EvaluationConfig(core=CoreConfig(bundle=write_bundle(tmp_path, tasks))))
    assert core is not None
    assert core.every is None
    assert core.prepare(context)
    found = core.evaluate(jax.device_put(params), step=1)

    expected = {}
    for label, kind, items, shots, delimiter in tasks:
        items = list(items)
        random.Random(1337).shuffle(items)
        right = 0
        for number, item in enumerate(items):
            of = task(kind, shots, delimiter)
            prompts = prompts_of(of, item, examples_of(of, items, number))
            if kind == "language_modeling":
                (short, _), (tokens, found_here) = scores(prompts[0]), scores(prompts[1])
                answers = range(len(short), len(tokens))
                right += all(found_here[at - 1].argmax() == tokens[at] for at in answers)
                continue
            losses = []
            answers = item["choices"] if "choices" in item else [item["continuation"]] * 2
            prompts = prompts[1:] if kind == "completion" else prompts
            for prompt, answer in zip(prompts, answers, strict=True):
                tokens, found_here = scores(prompt)
                begin = len(ids(prompt[: -len(answer)].rstrip(" ")))  # the space is a part of the first token
                begin -= max(0, len(ids(prompt)) - 128)
                losses.append(-np.mean([found_here[at - 1, tokens[at]] for at in range(begin, len(tokens))]))
            right += int(np.argmin(losses)) == item["gold"]
        expected[label] = right / len(items)
    assert {label: found[label] for label in expected} == pytest.approx(expected)
    assert expected["some_texts"] >= 3 / 9
    center = {label: (value - 0.25) / 0.75 for label, value in expected.items()}
    assert {label: found[f"{label}/centered"] for label in center} == pytest.approx(center)
    assert found["metric"] == pytest.approx(np.mean(list(center.values())))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "core.yaml").unlink(), "core.yaml"),
        (lambda folder: (folder / "core.yaml").write_text("icl_tasks: 3"), "core.yaml"),
        (lambda folder: (folder / "eval_meta_data.csv").write_text("Eval Task,Random baseline\n"), "eval_meta_data"),
        (lambda folder: (folder / "eval_data/a/one.jsonl").write_text('{"query": "a"}\n'), "one.jsonl:1"),
        (lambda folder: (folder / "eval_data/a/one.jsonl").write_text(json.dumps(CHOICES[0] | {"gold": 3})), "gold"),
        (lambda folder: (folder / "eval_data/a/one.jsonl").write_text(json.dumps(CHOICES[0])), "one.jsonl"),
    ],
)
def test_mistakes_in_the_files_name_the_file(gpt2, tmp_path, change, words):
    folder = write_bundle(tmp_path, [("one", "multiple_choice", CHOICES, 2, " ")])
    change(tmp_path)
    with pytest.raises(UserError, match=words):
        Core(CoreConfig(bundle=folder)).prepare(gpt2[0])


def test_settings_that_do_not_fit_are_errors(gpt2, tmp_path):
    context, params = gpt2
    long = [{"context": "a", "continuation": "many words and " * 60}] * 3
    folder = write_bundle(tmp_path, [("long", "language_modeling", long, 1, " ")])
    with pytest.raises(UserError, match="max_examples"):
        Core(CoreConfig(bundle=folder, max_examples=1)).prepare(context)
    core = Core(CoreConfig(bundle=folder))
    assert core.prepare(context)
    with pytest.raises(UserError, match="seq_len"):
        core.evaluate(jax.device_put(params), 1)
