"""Write configs/README.md from the models of the settings, and tests/golden/configs/ from the shipped configs.

    .venv/bin/python tools/config_guide.py            writes both
    .venv/bin/python tools/config_guide.py --check    exits with 1 if what is there differs

Review what changes: a changed default shows up here.
"""

import os
import sys

import yaml

from lmtrain.config.describe import Group, Setting, describe
from lmtrain.config.load import load_config
from lmtrain.run.config import RunConfig, resolved
from lmtrain.sharding.axes import MESH_AXES, USER_AXES

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CONFIGS = os.path.join(ROOT, "configs")

INTRO = """\
# Configs

A run is one YAML file. `lmtrain train FILE` takes a path, a URL that fsspec opens (`gs://`, `s3://`, `https://`) or the
name of a config in this folder, which an installed lmtrain brings along.

*This page is made by `tools/config_guide.py` from the settings' own descriptions.*

## Shipped configs

{configs}

`data/`, `optim/` and `trainer/` hold fragments to include.

## Writing one

```yaml
!include gpt2_small.yaml        # at the left margin: everything of that file, under what follows
data: !include data/own.yaml    # as a value: relative to this file, nested as deep as you like, from any URL
trainer:
  num_train_steps: 10000        # maps merge key by key, lists are replaced
optimizer:
  learning_rate: 6E-4           # YAML 1.2 numbers
  warmup: 1000                  # an int is steps; a float from 0.0 to 1.0 a fraction
```

The command line wins over the file, and the file over defaults: `--optimizer.learning_rate 3e-4`,
`--trainer.fsdp_axis=null`, `--data.train_urls '["a.jsonl", "b.jsonl"]'`, `--data "include data/wikitext103.yaml"`. A
source of text named on the command line replaces one of another kind in the file.

* `lmtrain config check FILE` finds every mistake at once, each with file and line.
* `lmtrain config show FILE` prints all settings and where each value came from.
* `lmtrain config schema > lmtrain.schema.json` makes an editor complete and check what you type: begin the file with
  `# yaml-language-server: $schema=lmtrain.schema.json` and tell the editor of `"yaml.customTags": ["!include scalar"]`.

Durations are written `90s`, `20m`, `2h`, `1d` or `1h30m`. `${{run_id}}` in `base_path`, `log_dir` or `logdir` stands
for the run's id. Older names still load, with a note: `trainer.wandb` (now `trainer.tracker`), `trainer.batch_size`
(now `train_batch_size`), `trainer.eval_per_device_parallelism` (now `per_device_eval_parallelism`),
`model: {{gpt2: {{...}}}}` (now `model: {{type: gpt2, ...}}`).

## Settings
"""

AXES = """\
## Batches

`train_batch_size` sequences make an update, over all devices; a list such as `[{{start: 0, value: 256}}, {{start:
1000, value: 512}}]` changes it on the way (one compile for each size), and every sequence still comes once.
`per_device_parallelism: -1` computes the batch at once: `train_batch_size * model_axis_size / devices` sequences on
each device. (The reference's table divides by `devices * model_axis_size`, its rule for accumulation as here; the
rule is right.) A smaller number accumulates gradients over several microbatches within the one step. The loss is the
mean over all target tokens of the batch, so neither accumulation nor the mesh changes it; with dropout the number of
microbatches is part of the random stream, and a change of it is told when a run goes on.

`mp: p=f32,c=bfloat16` keeps parameters and moments in float32 and computes in bfloat16; softmax, norms and loss are
float32 in any case. float16 is refused, since it needs loss scaling.

## The learning rate

`lmtrain config show FILE --plot-lr out.png` draws it. An int is always steps, a float always a fraction of the cycle
it is in: `warmup: 1` is one step, `1.0` all of it. Each cycle is `[warmup or rewarmup] -> [stable] -> [decay]`;
`cycles: 3` means three cycles with low points at thirds of the run (the reference's text says `num_train_steps / (c +
1)`, a slip). The low point itself is the first step of the next cycle, which is at the peak again unless `rewarmup`
is set.

## Splitting over devices

The mesh has three axes: `replica` (copies), `data` and `model`. `model_axis_size`, `replica_ici_axis_size` and
`replica_dcn_axis_size` say how large two of them are; `data` has the rest. In the basic mode the batch is split over
`replica` and `data`, parameters and optimizer state at rest over `data` (`fsdp_axis`), and what
`tensor_parallel_axes` names over `model`, in parameters and in computation. `[mlp, heads, vocab]` splits all work:
`heads` takes `kv_heads` with it, and the residual stream is split along the sequence between the blocks. Where
`kv_heads` do not divide, `axis_resources: {{kv_heads: null}}` gives each device all of them.

In the advanced mode, mappings of logical axes to mesh axes add to that: `axis_resources` for both,
`parameter_axis_resources` for parameters at rest, `compute_axis_resources` for computation, each a map such as
`{{mlp: model, embed: [replica, data], vocab: null}}`. `position: model` in `compute_axis_resources` splits sequences.
What does not divide, or would be split twice over the same devices, is an error that names the sizes. `lmtrain plan
FILE --devices N` shows the result.

## Attention and compiler options

`model.attn_backend: auto` takes the fastest backend that can do what the run asks, and the log says which and why:
on TPUs `splash`, on NVIDIA GPUs `cudnn` without documents and `triton` with them (documents, windows, ALiBi, grouped
heads, heads up to 256 wide, in 16 bits), else `xla`, or `blockwise` from 4,096 tokens on. On an accelerator the last
two are a warning: dropout on the attention weights (`attn_pdrop`), 32-bit computation and Sophia-H exclude the kernels.

`trainer.xla_options` is a map of options of XLA's compilers, over lmtrain's own for the platform; null takes one of
these away. They are logged at the start and kept with the run; an option that XLA does not know is an error.
`lmtrain plan` compiles with them, so that their effect can be seen without the device.

## Axes

Logical axes, for `fsdp_axis`, `tensor_parallel_axes` and the `axis_resources`:

{logical}

Axes of the mesh:

{mesh}

## From own text to a model of your own

1. **Text.** JSON lines with a `text` key, a document a line, in files of some hundred MB: each becomes a shard, and
   shards are tokenized side by side. Deduplicate and filter before; keep some documents apart for validation. `lmtrain
   tokenizer train 'my_text/*.jsonl' --output my_tokenizer` learns a tokenizer, or `data.tokenizer` names one of the
   hub. `lmtrain preprocess FILE` builds the cache ahead of training, and says how many tokens there are.
2. **Size.** As a rule of thumb a model of N parameters wants 20 N tokens (Hoffmann et al. 2022), and for use rather
   than for the lowest loss of the training alone many times that. Begin with a shipped config near the size, on a
   hundredth of the steps.
3. **Batch.** `train_batch_size * seq_len` of 0.25 to 0.5 M tokens an update suits models of 100 M to 1 B parameters,
   1 to 4 M larger ones. `lmtrain plan FILE --devices N --device KIND` says whether a step fits; if not, first
   `gradient_checkpointing`, then a smaller `per_device_parallelism`, which accumulates and changes nothing else.
4. **Steps.** `num_train_steps = tokens / (train_batch_size * seq_len)`, or `epoch: 1` for one pass over what is there.
   Schedules follow it. `warmup` of 1 to 2 % of the steps, `learning_rate` about 6e-4 at 100 M parameters and 3e-4 at
   1 B with Adam; `lmtrain config show FILE --plot-lr lr.png` draws it.
5. **Watching.** `train/loss` and `eval/loss` over the logarithm of the step: nearly a straight line once the learning
   rate is warm, then slowly flatter. On plain axes a healthy run looks finished after a tenth of it. A loss that jumps
   and stays wants a lower learning rate, or `optimizer.skip_bad_steps`; `grad/norm/total` that grows for thousands
   of steps comes before it. `eval/bpb`, bits per byte, compares models with different tokenizers. `lmtrain report`
   draws all of it.
6. **Evaluating.** Every `steps_per_eval`, for every validation set; afterwards `lmtrain eval FILE`, also with
   `--checkpoint` or `--hf`.
7. **Exporting.** `lmtrain export-hf FILE --output my_model --verify`, and then
   `AutoModelForCausalLM.from_pretrained("my_model")` anywhere.
"""


def main() -> int:
    pages = {os.path.join("configs", "README.md"): guide()}
    for name in shipped():
        path = os.path.join("tests", "golden", "configs", f"{name}.yaml")
        config = load_config(RunConfig, os.path.join(CONFIGS, f"{name}.yaml")).config
        pages[path] = yaml.safe_dump(resolved(config), sort_keys=False, allow_unicode=True)
    stale = [path for path, text in pages.items() if _read(os.path.join(ROOT, path)) != text]
    if "--check" in sys.argv[1:]:
        print("\n".join(f"{path}: out of date, run tools/config_guide.py" for path in stale) or "up to date")
        return 1 if stale else 0
    for path in stale:
        with open(os.path.join(ROOT, path), "w", encoding="utf-8") as file:
            file.write(pages[path])
        print(f"wrote {path}")
    return 0


def guide() -> str:
    rows = [f"| [`{name}`]({name}.yaml) | {_about(name)} |" for name in shipped()]
    configs = "\n".join(["| config | what it costs and gives |", "| --- | --- |", *rows])
    parts = [INTRO.format(configs=configs)]
    parts += [_section(group) for group in describe(RunConfig)]
    parts.append(AXES.format(logical=_list(USER_AXES), mesh=_list(MESH_AXES)))
    return "\n".join(parts)


def shipped() -> list[str]:
    return sorted(name.removesuffix(".yaml") for name in os.listdir(CONFIGS) if name.endswith(".yaml"))


def _about(name: str) -> str:
    """The comment a config begins with."""
    lines = []
    with open(os.path.join(CONFIGS, f"{name}.yaml"), encoding="utf-8") as file:
        for line in file:
            if not line.startswith("#"):
                break
            lines.append(line.lstrip("# ").strip())
    return " ".join(lines)


def _section(group: Group) -> str:
    rows = [_row(setting) for setting in group.settings]
    table = "\n".join(["| setting | meaning | type | default |", "| --- | --- | --- | --- |", *rows])
    return f"### {group.title}\n\n{_escape(group.doc)}\n\n{table}\n"


def _row(setting: Setting) -> str:
    cells = (f"`{setting.name}`", _escape(setting.description), _escape(setting.type), f"`{setting.default}`")
    return f"| {' | '.join(cells)} |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _list(words: dict[str, str]) -> str:
    return "\n".join(f"* `{word}`: {meaning}" for word, meaning in words.items())


def _read(path: str) -> str | None:
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as file:
        return file.read()


if __name__ == "__main__":
    sys.exit(main())
