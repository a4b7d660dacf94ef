"""The model of a checkpoint, for the verbs that use one: export-hf and generate."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from lmtrain.checkpoint.discovery import Checkpoint, find_checkpoint
from lmtrain.commands.arguments import Parser, Run
from lmtrain.config.compare import describe_differences
from lmtrain.config.errors import UserError
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.run_config import identity

if TYPE_CHECKING:
    from lmtrain.models.interface import LanguageModel
    from lmtrain.sharding.mesh import Layout


@dataclass(frozen=True)
class CheckpointModel:
    """A checkpoint that fits the config, with its tokenizer; `load` brings in JAX and the arrays."""

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    run: Run

    def load(self) -> "Loaded":
        """The model with its parameters, on the devices of this machine."""
        from lmtrain.models.registry import build_model
        from lmtrain.sharding.mesh import plan_layout
        from lmtrain.train.restore import restore_params

        layout = plan_layout(self.run.config.trainer)
        model = build_model(self.run.config.model, self.tokenizer.vocab_size)
        return Loaded(model, restore_params(self.checkpoint, model, layout), layout)


class Loaded(NamedTuple):
    """A Linen module, its parameters, and the layout they are on."""

    model: "LanguageModel"
    params: Any
    layout: "Layout"


def add_checkpoint_flag(parser: Parser) -> None:
    parser.add_argument(
        "--checkpoint",
        "--checkpoint_path",
        metavar="PATH",
        help="step folder, run folder or a parent (default: the config's own run)",
    )


def find_model(run: Run, path: str | None) -> CheckpointModel:
    """The checkpoint at `path`, by default the newest of the config's own run.

    Raises `UserError` if there is none, or if it is of another model or tokenizer than the config says.
    """
    run.refuse_planned()
    folder = path or run.config.trainer.checkpointer.run_folder(run.id)
    checkpoint = find_checkpoint(folder)
    tokenizer = open_tokenizer(run.config.data.tokenizer, run.config.data.vocab_size)
    saved = checkpoint.read_run_info()["identity"]
    now = {"model": identity(run.config)["model"], "tokenizer": tokenizer.identity}
    differences = describe_differences({name: saved[name] for name in now}, now, "the checkpoint", "this config")
    if differences:
        report = "\n".join(f"  {line}" for line in differences)
        raise UserError(f"{checkpoint.path} is not of this config's model\n{report}")
    return CheckpointModel(checkpoint, tokenizer, run)
