"""Hugging Face exports of trained models, also in the background of a run."""

import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from lmtrain.hf.chat_template import ChatTemplate
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.lora.model import ADAPTERS, AdaptedModel
from lmtrain.models.interface import LanguageModel
from lmtrain.run.config import RunConfig, resolved
from lmtrain.runtime.distributed import gather
from lmtrain.runtime.errors import UserError
from lmtrain.runtime.logging import Processes, log
from lmtrain.runtime.storage import is_url, join
from lmtrain.sharding.mesh import Layout
from lmtrain.weights.export_folder import BaseIdentity, ModelOrigin, export_folder, is_missing, remove_interrupted_steps
from lmtrain.weights.hf_config import hf_ref
from lmtrain.weights.load_checkpoint import gather_tensors
from lmtrain.weights.model_card import ModelCard
from lmtrain.weights.write_export import DTYPES, Export, build_adapter_export, build_export, write_export


def _prepare(folder: str) -> None:
    """Create the folder, and remove partial exports of a killed process. Raises `UserError` if it cannot be created."""
    try:
        if not is_url(folder):
            os.makedirs(os.path.expanduser(folder), exist_ok=True)
        remove_interrupted_steps(folder)
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
        origin: ModelOrigin,
        model: LanguageModel,
        tokenizer: Tokenizer,
        layout: Layout,
        processes: Processes,
        chat_template: ChatTemplate | None = None,
        generation: Mapping[str, Any] | None = None,
    ):
        self._card = ModelCard(run=origin.run, config=resolved(config), initial=hf_ref(config))
        self._every = config.hf_save_steps
        self._upload_to = config.hf_upload
        self._folder = export_folder(config.hf_save_path, origin.run)
        self._last_step = config.trainer.num_train_steps
        if self._folder is not None and processes.is_first:
            _prepare(self._folder)
        self._run = origin.run
        dtype = config.hf_save_dtype or config.trainer.precision.params
        if isinstance(model, AdaptedModel):
            export = build_adapter_export(config, model, tokenizer, dtype, origin, hf_ref(config))
        else:
            export = build_export(config.model, model, tokenizer, dtype, origin)
        self._export = replace(export, chat_template=chat_template, generation=generation or {})
        self._layout = layout
        self._vocab_size = model.vocab_size
        self._processes = processes
        self._thread: threading.Thread | None = None
        self.failed: list[int] = []

    def set_base(self, base: BaseIdentity) -> None:
        """Record the base of the adapters, which is loaded later than the exporter is created."""
        assert self._export.origin is not None
        self._export = replace(self._export, origin=self._export.origin._replace(base=base))

    def due(self, step: int, last: bool) -> bool:
        """Whether the state after `step` updates is to be exported."""
        return last or step % self._every == 0

    def was_missed(self, step: int) -> bool:
        """Whether a run that resumes after `step` was killed before the export of that step was complete."""
        if step == 0 or not self.due(step, last=step >= self._last_step):
            return False
        # the first process removes interrupted exports, so another may see them before or after
        return bool(gather(self._processes, "export", is_missing(self._folder, step))[0])

    def export(self, step: int, params: Any) -> None:
        """Copy the parameters to the host, then write and upload them in the background."""
        self.finish()
        dtype = DTYPES[self._export.dtype]
        params = params[ADAPTERS] if self._export.is_adapter else params
        copied = []
        for tensor in gather_tensors(params, self._export.pieces, self._layout, self._vocab_size):
            if self._processes.is_first:
                copied.append(tensor.astype(dtype))
        if self._processes.is_first:
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
            export = self._export.with_card(self._card, step)
            output = None if self._folder is None else join(self._folder, f"step-{step}")
            if output is not None:
                write_export(output, export, tensors)
                log.info(f"exported {output}")
            if self._upload_to is not None:
                self._upload(step, export, tensors, output)
        except Exception as error:  # no error of an export may end a long run
            self.failed.append(step)
            log.error(f"export of step {step} failed, training continues: {error}")

    def _upload(self, step: int, export: Export, tensors: list[np.ndarray], written: str | None) -> None:
        from lmtrain.hf.hub import upload_folder

        assert self._upload_to is not None
        with tempfile.TemporaryDirectory() as temporary:
            if written is None or is_url(written):  # uploads need local files
                written = os.path.join(temporary, "export")
                write_export(written, export, tensors)
            url = upload_folder(written, self._upload_to, f"{self._run}, step {step}")
        log.info(f"uploaded step {step}: {url}")
