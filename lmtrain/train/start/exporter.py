"""Hugging Face exports of trained models, also in the background of a run."""

import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from lmtrain.config.errors import UserError
from lmtrain.hf.export import DTYPES, Export, Origin, write_export
from lmtrain.hf.export_folder import export_folder, is_missing
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.lora.model import ADAPTERS, AdaptedModel
from lmtrain.models.config import ModelConfig
from lmtrain.models.interface import LanguageModel
from lmtrain.models.registry import hf_family
from lmtrain.run.config import RunConfig
from lmtrain.runtime.logging import log
from lmtrain.runtime.storage import is_url, join
from lmtrain.sharding.mesh import Layout
from lmtrain.train.start.hf_model import hf_ref
from lmtrain.train.start.hf_params import gather_tensors, plan_hf_pieces
from lmtrain.train.start.peft_params import plan_adapter_export


def plan_export(
    config: ModelConfig, model: LanguageModel, tokenizer: Tokenizer, dtype: str, origin: Origin | None = None
) -> Export:
    """An export without the values. Raises `UserError` naming a setting that the target format cannot represent."""
    family = hf_family(config.type)
    hf_config = family.to_hf_config(config, model.vocab_size, tokenizer.eos_id, tokenizer.bos_id)
    extra = family.extra_files() if hasattr(family, "extra_files") else {}
    return Export(plan_hf_pieces(config, model), hf_config, extra, tokenizer, dtype, origin, config.seq_len)


def _prepare(folder: str) -> None:
    """Create the folder, and remove partial exports of a killed process. Raises `UserError` if it cannot be created."""
    if is_url(folder):
        return
    folder = os.path.expanduser(folder)
    try:
        os.makedirs(folder, exist_ok=True)
        for name in os.listdir(folder):
            if re.fullmatch(r"step-\d+\.(tmp|old)-\d+", name):
                shutil.rmtree(os.path.join(folder, name))
    except OSError as error:
        raise UserError(f"hf_save_path: {folder} cannot be created: {error.strerror}") from None


class Exporter:
    """Exports during training; with LoRA, those of the adapters.

    The steps wait only for the copy to the host; files are written in the background. A failed export is logged and
    does not end the run: the checkpoint of that step can be exported by hand. All processes of a run have to call
    `export`; the first one writes. Raises `UserError` for a model that cannot be exported.
    """

    def __init__(
        self,
        config: RunConfig,
        origin: Origin,
        model: LanguageModel,
        tokenizer: Tokenizer,
        layout: Layout,
        is_first: bool,
    ):
        self._every = config.hf_save_steps
        self._upload_to = config.hf_upload
        self._folder = export_folder(config.hf_save_path, origin.run)
        self._last_step = config.trainer.num_train_steps
        if self._folder is not None and is_first:
            _prepare(self._folder)
        self._run = origin.run
        dtype = config.hf_save_dtype or config.trainer.precision.params
        self._export: Export
        if isinstance(model, AdaptedModel):
            self._export = plan_adapter_export(config, model, tokenizer, dtype, origin, hf_ref(config))
        else:
            self._export = plan_export(config.model, model, tokenizer, dtype, origin)
        self._layout = layout
        self._vocab_size = model.vocab_size
        self._is_first = is_first
        self._thread: threading.Thread | None = None
        self.failed: list[int] = []

    def due(self, step: int, last: bool) -> bool:
        """Whether the state after `step` updates is to be exported."""
        return last or step % self._every == 0

    def was_missed(self, step: int) -> bool:
        """Whether a run that resumes after `step` was killed before the export of that step was complete."""
        if step == 0 or not self.due(step, last=step >= self._last_step):
            return False
        return is_missing(self._folder, step)

    def export(self, step: int, params: Any) -> None:
        """Copy the parameters to the host, then write and upload them in the background."""
        self.finish()
        dtype = DTYPES[self._export.dtype]
        params = params[ADAPTERS] if self._export.is_adapter else params
        copied = []
        for tensor in gather_tensors(params, self._export.pieces, self._layout, self._vocab_size):
            if self._is_first:
                copied.append(tensor.astype(dtype))
        if self._is_first:
            self._thread = threading.Thread(target=self._write, args=(step, copied), name=f"export of step {step}")
            self._thread.start()

    def finish(self) -> None:
        """Wait for the running export."""
        self.under_way()()

    def under_way(self) -> Callable[[], None]:
        """A function that waits for the export running now, from any thread, also if another export starts later."""
        return (lambda: None) if self._thread is None else self._thread.join

    def _write(self, step: int, tensors: list[np.ndarray]) -> None:
        try:
            output = None if self._folder is None else join(self._folder, f"step-{step}")
            if output is not None:
                write_export(output, self._export, tensors)
                log.info(f"exported {output}")
            if self._upload_to is not None:
                self._upload(step, tensors, output)
        except Exception as error:  # no error of an export may end a long run
            self.failed.append(step)
            log.error(f"export of step {step} failed, training continues: {error}")

    def _upload(self, step: int, tensors: list[np.ndarray], written: str | None) -> None:
        from lmtrain.hf.upload import upload_folder

        assert self._upload_to is not None
        with tempfile.TemporaryDirectory() as temporary:
            if written is None or is_url(written):  # uploads need local files
                written = os.path.join(temporary, "export")
                write_export(written, self._export, tensors)
            url = upload_folder(written, self._upload_to, f"{self._run}, step {step}")
        log.info(f"uploaded step {step}: {url}")
