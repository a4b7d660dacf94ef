"""A Llama of the shapes of Llama 3.2 1B at length 8192, next to published figures of torchtitan and MaxText.

The step is the first of a few, in order of decreasing expected speed, whose memory fits by the compiler's figure.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from on_gpu.device import memory
from on_gpu.published import LLAMA
from on_gpu.results import Result, Table, Verdict
from on_gpu.step import Step, compile_step, row, runner
from on_gpu.timing import Pace, take_turns

VOCAB = 128256
MODEL = {
    "type": "llama",
    "hidden_dim": 2048,
    "intermediate_dim": 8192,
    "num_heads": 32,
    "num_kv_heads": 8,
    "num_layers": 16,
    "seq_len": 8192,
    "tie_word_embeddings": True,
    "rope": {"theta": 500000.0},
}
NANO = {"hidden_dim": 32, "intermediate_dim": 64, "num_heads": 4, "num_kv_heads": 2, "num_layers": 2, "seq_len": 32}
NANO_MEMORY = 16 * 2**20  # the first candidate of a dry run does not fit


class Candidate(NamedTuple):
    """Sequences per step, and what is recomputed in the backward pass."""

    sequences: int
    recomputes: bool | str

    @property
    def text(self) -> str:
        return f"{self.sequences} sequence(s), gradient_checkpointing {str(self.recomputes).lower()}"


CANDIDATES = [Candidate(4, False), Candidate(4, "dots"), Candidate(4, True), Candidate(1, True)]
NANO_CANDIDATES = [Candidate(64, False), Candidate(2, True)]


def run(dry: bool, pace: Pace) -> Iterator[Result]:
    model, vocab = (MODEL | NANO, 512) if dry else (MODEL, VOCAB)
    candidates, capacity = (NANO_CANDIDATES, NANO_MEMORY) if dry else (CANDIDATES, memory())
    for masks in (False, True):
        how = "documents kept apart" if masks else "documents not kept apart, as by the peers"
        title = f"Steps of a 1B Llama: {model['num_layers']} layers, length {model['seq_len']}, {how}"

        def compile(candidate: Candidate, masks: bool = masks) -> Step:
            settings = {**model, "gradient_checkpointing": candidate.recomputes, "scan_layers": False}
            return compile_step(settings, candidate.sequences, vocab, masks)

        found, rows = first_that_fits(candidates, compile, capacity)
        if found is None:
            yield Verdict("llama", False, f"no candidate fits this device: {rows[-1]['note']}")
        else:
            candidate, step = found
            seconds = take_turns({"step": runner(step)}, pace)["step"]
            rows.append(row(f"lmtrain, {candidate.text}", step, seconds, dry))
        yield Table(title, rows + ([] if masks else LLAMA))


def first_that_fits(
    candidates: Sequence[Candidate], compile: Callable[[Candidate], Step], capacity: float
) -> tuple[tuple[Candidate, Step] | None, list[dict[str, Any]]]:
    """The first candidate whose peak is at most `capacity` bytes, and a row for each before it."""
    rows = []
    for candidate in candidates:
        step = compile(candidate)
        if step.memory <= capacity:
            return (candidate, step), rows
        needed = f"{step.memory / 2**30:.3g} GiB of {capacity / 2**30:.3g}"
        rows.append({"system": f"lmtrain, {candidate.text}", "note": f"does not fit: {needed}"})
    return None, rows
