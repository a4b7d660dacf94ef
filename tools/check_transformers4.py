"""Both halves of tools/check_transformers4.sh, which run in different environments.

check_transformers4.py export FOLDER [NAME ...]    with lmtrain: write exports and our logits to FOLDER/<variant>/
check_transformers4.py load FOLDER                 with any transformers: compare logits and print a table
"""

import os
import sys

import numpy as np

TESTS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests")
LOGITS = "our_logits.npz"
TOLERANCE = 1e-4


def export(folder: str, names: list[str]) -> int:
    sys.path.insert(0, TESTS)
    from parity.variants import TOKENIZER, VARIANTS, make, tokens

    from lmtrain.sharding.config import PartitioningConfig
    from lmtrain.sharding.mesh import build_layout
    from lmtrain.weights.load_checkpoint import gather_tensors
    from lmtrain.weights.write_export import build_export, write_export

    layout = build_layout(PartitioningConfig())
    os.makedirs(folder)
    for name in names or VARIANTS:
        variant = make(name)
        plan = build_export(variant.config, variant.model, TOKENIZER, "float32")
        tensors = gather_tensors(variant.params, plan.pieces, layout, variant.model.vocab_size)
        write_export(os.path.join(folder, name), plan, tensors)
        np.savez(os.path.join(folder, name, LOGITS), ids=tokens(), logits=variant.logits(tokens()))
    return 0


def load(folder: str) -> int:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    names = sorted(os.listdir(folder))
    width = max(map(len, names))
    print(f"transformers {transformers.__version__}, torch {torch.__version__}")
    print(f"{'variant':{width}}  {'class':20}     eager   default  largest logit")
    failed = []
    for name in names:
        try:
            kind, eager, largest, left = compare(os.path.join(folder, name), attn_implementation="eager")
            default = compare(os.path.join(folder, name))[1]
        except Exception as error:  # continue with the others
            failed.append(name)
            print(f"{name:{width}}  {type(error).__name__}: {str(error).strip().splitlines()[0]}")
            continue
        if left or not max(eager, default) <= TOLERANCE:
            failed.append(name)
        print(f"{name:{width}}  {kind:20}  {eager:8.2g}  {default:8.2g}  {largest:13.3g}  {left or ''}".rstrip())
    print(f"failed: {', '.join(failed)}" if failed else f"all {len(names)} agree within {TOLERANCE:g}")
    return 1 if failed else 0


def compare(folder: str, **options: str) -> tuple[str, float, float, dict[str, list[str]]]:
    """-> class of the model, largest difference of logits, largest logit, tensors missing or left over."""
    import torch
    from transformers import AutoModelForCausalLM

    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, torch_dtype=torch.float32, output_loading_info=True, trust_remote_code=True, **options
    )
    stored = np.load(os.path.join(folder, LOGITS))
    with torch.no_grad():
        found = model.eval()(torch.from_numpy(stored["ids"])).logits.numpy()
    left = {what: sorted(map(str, tensors)) for what, tensors in loading.items() if tensors}
    return type(model).__name__, float(np.abs(found - stored["logits"]).max()), float(np.abs(found).max()), left


if __name__ == "__main__":
    what, where, *rest = sys.argv[1:]
    sys.exit(export(where, rest) if what == "export" else load(where))
