"""Shared by all tests: no network, one small corpus, one tiny config, one compilation cache."""

import os
from importlib.metadata import version

# Before any import of huggingface_hub, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"
for _name in ("RUN_ID", "WANDB_API_KEY"):
    os.environ.pop(_name, None)
# Tiny programs run for microseconds, but compilation takes time, here and in every process that is started. Fusions
# through LLVM's older emitters compile a training step in less than half the time that the ones through MLIR take;
# JAX 0.12 has only the latter, and ends on a flag that it does not know.
_older_fusions = " --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""
_older_fusions += " --xla_cpu_parallel_codegen_split_count=1" if _older_fusions else ""  # 8 % less processor time
os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true{_older_fusions}"

import atexit  # noqa: E402
import contextlib  # noqa: E402
import fcntl  # noqa: E402
import gc  # noqa: E402
import io  # noqa: E402
import json  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import yaml  # noqa: E402

# Tracing takes more time than compilation: 13 % of it for collections of garbage, which has few cycles, and 7 % for the
# lines of code of each operation (`_no_lines`).
gc.set_threshold(100_000, 50, 1000)

# A suite that a script starts in the background ignores Ctrl-C, and the processes that its tests start would too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# All processes of a test session share a compilation cache: the workers of the suite and the processes they start; in
# CI also the suite and the long tests (.ci/run).
if "LMTRAIN_TEST_COMPILATION_CACHE" not in os.environ:
    _compiled = tempfile.mkdtemp(prefix="lmtrain-compiled-")
    atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
    os.environ["LMTRAIN_TEST_COMPILATION_CACHE"] = _compiled
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["LMTRAIN_TEST_COMPILATION_CACHE"]
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

from forked import Forked, ended, fork_workers_of_pools  # noqa: E402  # keeps the environment of this moment

fork_workers_of_pools()

CORPUS = Path(__file__).parent / "corpus"
TOKENIZER = CORPUS / "tokenizer"
TRAIN_FILES = [str(CORPUS / name) for name in ("train.1.jsonl", "train.2.jsonl.gz", "train.3.jsonl")]
VALIDATION_FILES = [str(CORPUS / "validation.jsonl")]


def tiny_settings() -> dict:
    """A complete config of minimal size: 2 layers of width 32, 12 steps, the test corpus."""
    return {
        "data": {
            "train_urls": list(TRAIN_FILES),
            "validation_urls": list(VALIDATION_FILES),
            "cache_dir": "cache",
            "tokenizer": str(TOKENIZER),
        },
        "model": {"type": "gpt2", "hidden_dim": 32, "num_heads": 2, "num_layers": 2, "seq_len": 32},
        "trainer": {
            "num_train_steps": 12,
            "train_batch_size": 4,
            "steps_per_eval": 6,
            "max_eval_batches": 2,
            "tracker": {"type": "json"},
            "jax_compilation_cache_dir": os.environ["LMTRAIN_TEST_COMPILATION_CACHE"],
            "checkpointer": {"save_interval": None, "keep": [{"every": 4}]},
        },
        "optimizer": {"learning_rate": 1.0e-2, "warmup": 2},
    }


# Started first, so that the workers of the suite and of the long tests finish at about the same time.
_LONGEST = (
    "tests/test_finetuning.py",
    "tests/slurm/",
    "tests/end_to_end/",
    "tests/test_readme.py",
    "tests/golden/",
    "tests/deploy/",
    "tests/multihost/",
    "tests/runtime/test_distributed.py",
    "tests/train/",
    "tests/sharding/",
    "tests/parity/",
    "tests/faults/",
    "tests/models/",
    "tests/remote/",
    "tests/preprocess/test_ray_cluster.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        places = (number for number, name in enumerate(_LONGEST) if item.nodeid.startswith(name))
        return next(places, len(_LONGEST))

    items.sort(key=rank)  # stable: within a file nothing moves


def pytest_unconfigure() -> None:
    """Leave nothing to the five collections of garbage by which pytest looks for unraisable exceptions at the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def handlers_of_a_shell():
    """Of the tests and of what they start, also if nohup started them."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def _user_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests do not use the user's caches of hub libraries and lmtrain."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.getbasetemp() / "user cache")


@pytest.fixture(scope="session", autouse=True)
def _no_lines() -> None:
    import jax

    jax.config.update("jax_traceback_in_locations_limit", 0)


@pytest.fixture
def settings() -> dict:
    """A tiny config as plain data, to change and then write with `write_config`."""
    return tiny_settings()


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    """`write_config(settings)` writes `tiny.yaml` in the test's folder and returns its path."""

    def write(settings: dict, name: str = "tiny.yaml") -> Path:
        path = tmp_path / name
        path.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        return path

    return write


@pytest.fixture
def lmtrain(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess]:
    """`lmtrain("train", "tiny.yaml", VARIABLE="value")` runs the command in the test's folder, in its own process.

    With `code`, its exit code has to be this one.
    """
    outputs = tmp_path_factory.mktemp("output")

    def run(*arguments: object, code: int | None = None, **environment: str) -> subprocess.CompletedProcess:
        out, err = outputs / "out.txt", outputs / "err.txt"
        with ended(Forked(arguments, tmp_path, out, errors=err, **environment)) as (process,):
            found = process.wait(300)
        return checked(subprocess.CompletedProcess(process.args, found, out.read_text(), err.read_text()), code)

    return run


def run_once(
    factory: pytest.TempPathFactory, name: str, settings: dict, *commands: Sequence[object], file: str = "tiny.json"
) -> Path:
    """A folder with `file`, in which the commands ran once for all workers of the suite: read only.

    `output.txt` has what the first one printed.
    """
    folder = factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / name
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "output.txt").exists():
            (folder / file).write_text(json.dumps(settings))  # JSON is YAML
            printed, *_ = [run_in_process(command, folder, code=0).stderr for command in commands]
            (folder / "output.txt").write_text(printed)
    return folder


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `tiny.json` and its run `one` of 12 steps: read only."""
    return run_once(tmp_path_factory, "tiny run", tiny_settings(), ["train", "tiny.json", "--trainer.id", "one"])


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `base.yaml`, its run `base` of 12 steps, and the export of that to the folder `base`: read only."""
    settings = tiny_settings()
    sizes = {"hidden_dim": 32, "intermediate_dim": 48, "num_heads": 4, "num_kv_heads": 2, "num_layers": 2}
    settings["model"] = {"type": "llama", **sizes, "seq_len": 64}
    settings["trainer"] |= {"id": "base", "steps_per_eval": 12}
    commands = (["train", "base.yaml"], ["export-hf", "base.yaml", "--output", "base"])
    return run_once(tmp_path_factory, "tiny llama", settings, *commands, file="base.yaml")


def log_lines(folder: Path, run: str = "one") -> list[dict]:
    """The lines of a run's metrics log."""
    return [json.loads(line) for line in (folder / "logs" / f"{run}.metrics.jsonl").read_text().splitlines()]


def logged(folder: Path, name: str, run: str = "one") -> dict[int, float]:
    """The values of a metric, by step."""
    return {line["step"]: line[name] for line in log_lines(folder, run) if name in line}


def checked(done: subprocess.CompletedProcess, code: int | None) -> subprocess.CompletedProcess:
    """`done`, whose exit code has to be `code` if one is given, without a traceback."""
    assert code is None or (done.returncode == code and "Traceback" not in done.stderr), done.stderr
    return done


def run_in_process(arguments: Sequence[object], cwd: Path, code: int | None = None) -> subprocess.CompletedProcess:
    """Run `lmtrain` with these arguments in `cwd`, within this process, which saves the seconds of a start.

    With `code`, its exit code has to be this one.

    Separate processes are required for signals and kills, several processes and output at exit. One test of each
    command uses one too, as a user does.
    """
    from lmtrain.cli import main

    out, err, argv, before = io.StringIO(), io.StringIO(), list(map(str, arguments)), os.getcwd()
    os.chdir(cwd)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(argv)
    except SystemExit as ended:
        return checked(subprocess.CompletedProcess(argv, ended.code, out.getvalue(), err.getvalue()), code)
    finally:
        os.chdir(before)
    raise AssertionError("main() ends with an exit code")


@pytest.fixture
def run_cli(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """`run_cli("config", "show", "tiny.yaml", code=0)` in the test's folder, within this process."""
    return lambda *arguments, code=None: run_in_process(arguments, tmp_path, code)
