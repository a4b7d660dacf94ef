"""Weights & Biases tracker. The only module that imports wandb."""

import configparser
import contextlib
import functools
import inspect
import netrc
import os
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from lmtrain.config.load import first_problem
from lmtrain.config.tree import dotted
from lmtrain.runtime.errors import UserError, suggest_name
from lmtrain.runtime.logging import log
from lmtrain.runtime.redact import redact
from lmtrain.runtime.storage import list_files
from lmtrain.tracking.config import WandbConfig
from lmtrain.tracking.provenance import code_files, code_root, remote_with_credentials

# Timeout of wandb.init: shorter than the wait for trackers at the end, so that a short run is offline before it ends.
_INIT_SECONDS = 20.0
# Maximum length of an artifact's name; longer names keep their end, which contains the kind.
_MAX_NAME_CHARACTERS = 128
# The hyperparameter that differs between runs with the same settings on different data.
DATA = "data_tokens"
# Hosts under which versions of `wandb login` store the API key; the first is the current default.
HOSTS = ("api.forge.coreweave.com", "api.wandb.ai")
# Settings that are no keywords of `wandb.init`.
_OURS = {"type", "save_code", "save_xla_dumps", "init"}


class WandbTracker:
    """Resumes the W&B run of the same id after a restart. Without an API key it logs offline, with a message.

    `secrets` are those of the run's config; code files that hold one are not saved.
    """

    def __init__(self, config: WandbConfig, run: str, log_dir: str, secrets: Sequence[str] = ()):
        import wandb  # slow to import; only the tracker's thread waits for it

        mode = config.mode
        from_environment = os.environ.get("WANDB_MODE") if mode is None else None
        if mode is None and not from_environment and not has_key():
            mode = "offline"
            log.info(f"W&B: no API key found, logging offline to {log_dir}; upload it later with `wandb sync`")
        elif from_environment == "offline":
            log.info(f"W&B: WANDB_MODE=offline, logging to {log_dir}; upload it later with `wandb sync`")
        elif from_environment == "disabled":
            log.warning("W&B: WANDB_MODE=disabled, nothing is logged to W&B; unset it to log")
        keywords = {"dir": log_dir} | config.model_dump(exclude=_OURS) | config.init
        keywords = {name: value for name, value in keywords.items() if value is not None}
        keywords |= {"name": config.name or run, "id": config.id or run}
        if "resume_from" in keywords or "fork_from" in keywords:  # W&B accepts only one of the three
            keywords.pop("resume", None)
        settings = {"silent": True, "init_timeout": _INIT_SECONDS, **keywords.pop("settings", {})}
        if (remote := remote_with_credentials()) is not None:  # W&B would save the user name, which may be a token
            settings = {"git_remote_url": remote, **settings}
        keywords = redact(keywords)  # W&B saves them
        keywords.pop("mode", None)
        start = functools.partial(wandb.init, **keywords, settings=wandb.Settings(**settings))
        try:
            self._run = start(mode=mode)
        except wandb.errors.CommError as error:
            reason = str(error).splitlines()[0]
            log.warning(f"W&B is not available ({reason}): logging offline to {log_dir}; upload it with `wandb sync`")
            wandb.teardown()  # a pending connection attempt holds the run's id
            self._run = start(mode="offline")
        if config.save_code and not self._run.disabled:
            try:
                self._save_code(f"{run}-code", secrets)
            except Exception as error:  # any error of W&B: the run is more than its code
                log.warning(f"W&B: the code could not be saved with the run: {error}")

    def _save_code(self, name: str, secrets: Sequence[str]) -> None:
        root = code_root()
        files = set() if root is None else code_files(root, secrets)
        if files:
            self._run.log_code(root, _artifact_name(name), include_fn=lambda path: path in files)

    def hyperparameters(self, config: Mapping[str, Any]) -> None:
        before = self._run.config.get(DATA)  # of an existing W&B run
        if before is not None and DATA in config and before != config[DATA]:
            log.warning(
                f"W&B: the existing run {self._run.id} was trained on other data: its metrics would be mixed with "
                "those of this run; set another trainer.id, or trainer.tracker.project"
            )
        self._run.config.update(dict(config), allow_val_change=True)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def summary(self, values: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(values))

    def artifact(self, path: str, name: str, kind: str) -> None:
        import wandb

        artifact = wandb.Artifact(_artifact_name(name), type=kind)
        if os.path.isdir(path):
            for file in list_files(path):  # add_dir would print a message
                artifact.add_file(os.path.join(path, file), name=file)
        else:
            artifact.add_file(path)
        self._run.log_artifact(artifact)

    def text(self, texts: Mapping[str, str], step: int) -> None:
        import wandb

        self._run.log({"samples": wandb.Table(["prompt", "text"], list(map(list, texts.items())))}, step=step)

    def finish(self) -> None:
        self._run.finish()


def _artifact_name(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[-_MAX_NAME_CHARACTERS:]


def check_keywords(keywords: Mapping[str, Any]) -> None:
    """Raise `UserError` for unknown keywords of `wandb.init`, and unknown or invalid fields of `wandb.Settings`."""
    import wandb

    known = inspect.signature(wandb.init).parameters
    for name in keywords:
        if name in WandbConfig.model_fields:
            raise UserError(f"trainer.tracker.init.{name}: set trainer.tracker.{name} instead")
        if name not in known:
            hint = suggest_name(name, known)
            advice = f"; did you mean {hint!r}?" if hint else ""
            raise UserError(f"trainer.tracker.init.{name}: wandb.init has no such keyword{advice}")
    settings = keywords.get("settings") or {}
    if not isinstance(settings, Mapping):
        raise UserError("trainer.tracker.init.settings: expected a map of fields of wandb.Settings")
    try:
        wandb.Settings(**settings)
    except ValidationError as error:
        path, message, _ = first_problem(error)
        name = dotted(path[:1])
        hint = suggest_name(name, wandb.Settings.model_fields)
        advice = f"; did you mean {hint!r}?" if hint and hint != name else ""
        raise UserError(f"trainer.tracker.init: wandb.Settings refuses settings.{name}: {message}{advice}") from None


def has_key() -> bool:
    """Whether there is a W&B API key, in the environment or in the netrc file, where `wandb login` stores it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    url = os.environ.get("WANDB_BASE_URL") or _host_of_login()
    hosts = HOSTS if url is None else (urllib.parse.urlsplit(url).netloc or url,)
    paths = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    for path in map(os.path.expanduser, paths):
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            logins = netrc.netrc(path)
            if any(logins.authenticators(host) for host in hosts):
                return True
    return False


def _host_of_login() -> str | None:
    """The host set with `wandb login --host`, from W&B's settings file."""
    folder = os.environ.get("WANDB_CONFIG_DIR", os.path.expanduser("~/.config/wandb"))
    settings = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(configparser.Error, OSError, UnicodeDecodeError):
        settings.read(os.path.join(folder, "settings"), encoding="utf-8")
    return settings.get("default", "base_url", fallback=None)
