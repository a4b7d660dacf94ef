"""A trained model, from a checkpoint or from Hugging Face, for the verbs that use one: eval, export-hf, generate."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from lmtrain.checkpoint.verify import choose_checkpoint
from lmtrain.commands.arguments import Parser, Run
from lmtrain.config.compare import describe_differences
from lmtrain.config.errors import UserError
from lmtrain.hf.find_tokenizer import open_tokenizer
from lmtrain.hf.tokenizer import Tokenizer
from lmtrain.run_config import RunConfig, identity

if TYPE_CHECKING:
    from lmtrain.models.interface import LanguageModel
    from lmtrain.sharding.mesh import Layout


class Loaded(NamedTuple):
    """A Linen module, its parameters, and the layout they are on."""

    model: "LanguageModel"
    params: Any
    layout: "Layout"


@dataclass(frozen=True)
class TrainedModel:
    """Where the model is from, how many steps it was trained if that is known, its config and its tokenizer.

    `get_params(model, layout)` brings the arrays in; until `load` nothing imports JAX.
    """

    source: str
    step: int | None
    config: RunConfig
    tokenizer: Tokenizer
    get_params: Callable[..., Any]

    def load(self) -> Loaded:
        """The model with its parameters, on the devices of this machine."""
        from lmtrain.models.registry import build_model
        from lmtrain.sharding.mesh import plan_layout, platform_of
        from lmtrain.train.program import plan_attention

        layout = plan_layout(self.config.trainer)
        attention = plan_attention(self.config, platform_of(layout.mesh.devices.flat[0]))
        model = build_model(self.config.model, self.tokenizer.vocab_size, attention)
        return Loaded(model, self.get_params(model, layout), layout)


def add_checkpoint_flag(parser: Parser) -> None:
    parser.add_argument(
        "--checkpoint",
        "--checkpoint_path",
        metavar="PATH",
        help="step folder, run folder or a parent (default: the config's own run)",
    )


def add_hf_flag(parser: Parser) -> None:
    parser.add_argument("--hf", metavar="REF", help="a Hugging Face model instead: folder, URL, or id[@revision]")


def from_checkpoint(run: Run, path: str | None) -> TrainedModel:
    """The checkpoint at `path`, by default the newest of the config's own run.

    Raises `UserError` if there is none, or if it is of another model or tokenizer than the config says.
    """
    config = run.config
    settings = config.trainer.checkpointer
    checkpoint = choose_checkpoint(
        path or settings.run_folder(run.id), settings.verify_on_restore, parts=("params", "average")
    )
    tokenizer = open_tokenizer(config.data.tokenizer, config.data.vocab_size)
    saved = checkpoint.read_run_info()["identity"]
    now = {"model": identity(config)["model"], "tokenizer": tokenizer.identity}
    differences = describe_differences({name: saved[name] for name in now}, now, "the checkpoint", "this config")
    if differences:
        report = "\n".join(f"  {line}" for line in differences)
        raise UserError(f"{checkpoint.path} is not of this config's model\n{report}")

    def get_params(model: "LanguageModel", layout: "Layout") -> Any:
        from lmtrain.train.restore import restore_params

        return restore_params(checkpoint, model, layout, settings.staging_dir)

    return TrainedModel(checkpoint.path, checkpoint.step, config, tokenizer, get_params)


def from_hf(ref: str, config: RunConfig) -> TrainedModel:
    """The Hugging Face model `ref`, of which `config` has the sizes, with the tokenizer of `config`."""
    tokenizer = open_tokenizer(config.data.tokenizer, config.data.vocab_size)

    def get_params(model: "LanguageModel", layout: "Layout") -> Any:
        from lmtrain.train.hf_params import load_hf_params

        return load_hf_params(ref, config.model, model, layout, config.trainer.precision.params)

    return TrainedModel(ref, None, config, tokenizer, get_params)
