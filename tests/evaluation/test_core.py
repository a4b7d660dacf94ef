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
from lmtrain.evaluation.core import Core, CoreTask, build, examples_of, prompts_of, read_items, read_tasks
from lmtrain.runtime.errors import UserError

ONE = "eval_data/a/one.jsonl"
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


ITEM = CHOICES[0]


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("core.yaml", None, "core.yaml"),
        ("core.yaml", "icl_tasks: 3", "core.yaml"),
        ("core.yaml", "icl_tasks: [{label: a}]", r"icl_tasks\[0\]"),
        ("core.yaml", "a: b\n  c: d", "core.yaml:2"),
        ("eval_meta_data.csv", None, "eval_meta_data.csv"),
        ("eval_meta_data.csv", "Eval Task,Random baseline\n", "one.*eval_meta_data.csv"),
        ("eval_meta_data.csv", "Eval Task,Random baseline\nother,5\none,100\n", "eval_meta_data.csv:3"),
        ("eval_meta_data.csv", "Eval Task,Random baseline\none,nan\n", "eval_meta_data.csv:2"),
        (ONE, '{"query": "a"}\n', "one.jsonl:1.*choices"),
        (ONE, "\n\n[]", "one.jsonl:3"),
        (ONE, "{", "one.jsonl:1"),
        (ONE, "", "one.jsonl.*no items"),
        (ONE, json.dumps(ITEM | {"gold": 3}), "gold 3"),
        (ONE, json.dumps(ITEM | {"gold": "1"}), "gold"),
        (ONE, json.dumps(ITEM | {"choices": ["a", 1, "b"]}), "choices"),
        (ONE, json.dumps(ITEM | {"query": "\ud800"}), "one.jsonl:1.*surrogate"),
        (ONE, json.dumps(ITEM), "one.jsonl.*examples"),
    ],
)
def test_mistakes_in_the_files_are_one_message_with_the_file_and_line(gpt2, tmp_path, file, text, words):
    folder = write_bundle(tmp_path, [("one", "multiple_choice", CHOICES, 2, " ")])
    if text is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(text)
    with pytest.raises(UserError, match=words) as found:
        Core(CoreConfig(bundle=folder)).prepare(gpt2[0])
    assert "Error" not in str(found.value)


@pytest.mark.parametrize(
    ("setting", "value"), [("num_fewshot", [-1]), ("num_fewshot", 0), ("continuation_delimiter", None)]
)
def test_a_wrong_setting_of_a_task_is_named(tmp_path, setting, value):
    folder = write_bundle(tmp_path, [("one", "multiple_choice", CHOICES, 2, " ")])
    tasks = yaml.safe_load((tmp_path / "core.yaml").read_text())
    tasks["icl_tasks"][0][setting] = value
    (tmp_path / "core.yaml").write_text(yaml.safe_dump(tasks))
    with pytest.raises(UserError, match=f"one: .*{setting}"):
        read_tasks(folder)


def test_items_may_have_any_character_and_blank_lines_between_them(tmp_path):
    odd = "a\u2028b\x0bc\x85d"
    folder = write_bundle(tmp_path, [("one", "multiple_choice", [], 0, " ")])
    lines = [json.dumps(ITEM | {"query": odd}, ensure_ascii=False), "", json.dumps(ITEM), ""]
    (tmp_path / ONE).write_text("\n".join(lines))
    (tmp_path / "eval_meta_data.csv").write_text("\ufeffEval Task,Random baseline\none,25\n")
    (task_of,) = read_tasks(folder)
    assert [item["query"] for item in read_items(task_of)] == [odd, ITEM["query"]]


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
