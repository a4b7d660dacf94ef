"""Every page for people is true as far as a parser can tell: configs load, commands parse, programs compile, links lead
somewhere, contents match headings, and README.md leads to every page."""

import html
import importlib
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmtrain.cli import VERBS
from lmtrain.commands.arguments import Parser
from lmtrain.commands.scaling import read_ladder
from lmtrain.config.describe import describe, show
from lmtrain.config.load import load_config
from lmtrain.config.yaml_loader import load_file
from lmtrain.run.config import RunConfig, resolved
from lmtrain.runtime.errors import UserError
from lmtrain.scaling.points import points

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
LANGUAGES = {"yaml", "bash", "python", "text"}
SECTIONS = ("data", "model", "trainer", "optimizer", "objective")
TRACKED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
# pages for people: tests/ has some as data of tests
PAGES = [ROOT / name for name in TRACKED.split() if not name.startswith("tests/") and (ROOT / name).exists()]


# A diary may name what has gone; of these guides a column is another project's names.
OURS = [page for page in PAGES if page.name != "BUILD-notes.md" and not page.name.startswith("from_")]
SETTINGS = {setting.name for group in describe(RunConfig) for setting in group.settings}
OTHER_NAMES = {
    *("trainer.wandb", "trainer.batch_size", "trainer.eval_per_device_parallelism"),
    "trainer.per_device_train_parallelism",
}


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, with the number of its first line."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{named(self.page)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    found, text = [], page.read_text()
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        found.append(Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2]))
    return found


def prose_of(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def test_every_block_names_one_of_the_languages_that_are_checked():
    assert len(BLOCKS) > 50
    assert [f"{block.place}: {block.language}" for block in BLOCKS if block.language not in LANGUAGES] == []


# --- configs


def working_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new working directory with the shipped configs in it, which a page's configs may include."""
    folder.mkdir()
    for path in CONFIGS.iterdir():
        if path.suffix == ".yaml" or path.name in ("data", "optim", "trainer"):
            (folder / path.name).symlink_to(path)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("RUN_ID", raising=False)
    return folder


def name_of_file(text: str) -> str | None:
    """`my.yaml` of a block that begins with `# my.yaml` or `# my.yaml: what it is`."""
    match = re.match(r"# ([\w./-]+\.yaml)\b", text)
    return match[1] if match else None


def write_config(folder: Path, block: Block) -> Path:
    """The block as a file; a part of a section is put into a shipped config."""
    path = folder / (name_of_file(block.text) or "block.yaml")
    path.unlink(missing_ok=True)  # a link to a shipped config
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text)
    if set(load_file(str(path)).data) & set(RunConfig.model_fields):
        return path
    for section in SECTIONS:
        whole = folder / f"in_{section}.yaml"
        whole.write_text(f"!include gpt2_nano.yaml\n{section}: !include {path.name}\n")
        try:
            load_config(RunConfig, str(whole))
        except UserError:
            continue
        return whole
    return path


def check_config(block: Block, folder: Path) -> None:
    """The block loads, as a config or a ladder, and recommends no older name."""
    for other in blocks_of(block.page):  # an earlier config of the page may be included
        if other.language == "yaml" and other.line < block.line and name_of_file(other.text):
            write_config(folder, other)
    if re.search(r"^sizes:", block.text, re.MULTILINE):  # a ladder
        ladder = read_ladder(str(write_config(folder, block)), 1000)
        assert points(ladder, ladder.rates[:1] * len(ladder.sizes))
        return
    loaded = load_config(RunConfig, str(write_config(folder, block)))
    assert [notice for notice in loaded.tree.notices if "now" in notice] == []


def test_what_check_and_show_print_is_on_the_page(tmp_path, monkeypatch):
    folder = working_folder(tmp_path / "page", monkeypatch)
    (folder / "mistakes.yaml").write_text("model: {num_layer: 8}\ntrainer:\n  num_train_steps: 10k\n")
    page = CONFIGS / "guide" / "configuration.md"
    mistakes, shown = [block.text for block in blocks_of(page) if block.language == "text"]
    with pytest.raises(UserError) as error:
        load_config(RunConfig, "mistakes.yaml")
    assert f"lmtrain: error: {error.value}\n" == mistakes
    write_config(folder, next(block for block in blocks_of(page) if name_of_file(block.text) == "my.yaml"))
    loaded = load_config(RunConfig, "my.yaml", [("optimizer.learning_rate", "3e-4")])
    printed = show(resolved(loaded.config), loaded.tree).splitlines()
    assert [line for line in shown.splitlines() if line not in printed] == []


# --- commands


class ParsedError(Exception):
    """Stops a command once its command line is understood."""


# What may stand in front of a command.
BEFORE = re.compile(r"until|while|if|do|then|time|exec|!|[A-Za-z_]+=.*")


def commands_in(text: str) -> list[list[str]]:
    """The words of every `lmtrain ...` in a shell text."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        commands: list[list[str]] = [[]]
        for word in lexer:
            if word == "--" or set(word) <= set("();<>|&"):  # a program may be given another one after `--`
                commands.append([])
            elif commands[-1] or not BEFORE.fullmatch(word):
                commands[-1].append(word)
        found += [words[1:] for words in commands if words and words[0].rpartition("/")[2] == "lmtrain"]
    return found


def parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise `UserError` for a verb, flag or setting that does not exist. Runs nothing."""
    assert words[0] in VERBS, f"no verb {words[0]}"
    module = importlib.import_module(f"lmtrain.commands.{VERBS[words[0]][0]}")

    def stop_after(parse):
        def parse_then_stop(*arguments, **more):
            parse(*arguments, **more)
            raise ParsedError

        return parse_then_stop

    with monkeypatch.context() as patch:
        if hasattr(module, "parse_run") and words[:2] != ["config", "schema"]:
            patch.setattr(module, "parse_run", stop_after(module.parse_run))
        else:
            patch.setattr(Parser, "parse_args", stop_after(Parser.parse_args))
        with pytest.raises(ParsedError):
            module.run(words[1:])


CONFIG_WORD = re.compile(r"(?:[\w.-]+://|[\w.-])[\w./-]*\.yaml")


def stand_ins(words: list[str], folder: Path) -> list[str]:
    """The words with a small config for every one that the page only names, and for the runs of `--run`."""
    result = list(words)
    for index, word in enumerate(words):
        if CONFIG_WORD.fullmatch(word) and not (folder / word).exists() and not (CONFIGS / Path(word).name).exists():
            stand_in = folder / "stand_ins" / Path(word).name
            stand_in.parent.mkdir(exist_ok=True)
            stand_in.write_text(f"!include {CONFIGS}/gpt2_nano.yaml\n")
            result[index] = str(stand_in)
        if index and words[index - 1] == "--run":
            kept = folder / "logs" / word
            kept.mkdir(parents=True, exist_ok=True)
            (kept / "config.yaml").write_text(f"!include {CONFIGS}/gpt2_nano.yaml\n")
    return result


def check_commands(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block is a shell program, and its commands of lmtrain parse."""
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for other in blocks_of(block.page):
        if other.language == "yaml" and name_of_file(other.text):
            write_config(folder, other)
    for words in commands_in(block.text):
        parse(stand_ins(words, folder), monkeypatch)


def test_commands_are_found_wherever_they_stand_in_a_line():
    text = (
        "A=1 lmtrain train x.yaml  # why\nrun a -- lmtrain doctor gs://b\nlmtrain eval \\\n 'x y' && bin/lmtrain plan a"
    )
    assert commands_in(text) == [["train", "x.yaml"], ["doctor", "gs://b"], ["eval", "x y"], ["plan", "a"]]
    assert commands_in("until lmtrain train a; do sleep 1; done\npkill lmtrain") == [["train", "a"]]


def parser_of(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Parser:
    """The parser of a command, with the flags of its own."""
    module = importlib.import_module(f"lmtrain.commands.{VERBS[words[0]][0]}")
    seen: list[Parser] = []

    def keep(parser, *arguments, **more):
        seen.append(parser)
        raise ParsedError

    with monkeypatch.context() as patch:
        patch.setattr(module, "parse_run", keep, raising=False)
        patch.setattr(Parser, "parse_args", keep)
        with pytest.raises(ParsedError):
            module.run([word for word in words[1:2] if not word.startswith("-")])
    return seen[0]


def commands_in_prose(page: Path) -> list[list[str]]:
    """The words of every `lmtrain VERB ...` that is written within a line, perhaps with placeholders."""
    return [text.split() for text in re.findall(r"`lmtrain ([a-z][^`]*)`", prose_of(page))]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_verbs_and_flags_that_are_named_within_a_line_exist(page, monkeypatch):
    for words in commands_in_prose(page):
        assert words[0] in VERBS, words
        flags = {re.split(r"[=\])]", word)[0] for word in words if word.startswith("--") and word != "--"}
        if flags - {"--help"}:
            own = {flag for action in parser_of(words, monkeypatch)._actions for flag in action.option_strings}
            settings = {f"--{name}" for name in SETTINGS | OTHER_NAMES}
            settings |= {f"--{name.partition('.')[2]}" for name in SETTINGS if words[0] == "plan"}
            settings |= {"--address", *(f"--{section}" for section in SECTIONS)}
            assert flags - own - settings == set(), words


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)], ids=named)
def test_configs_load_commands_parse_and_programs_compile(page, tmp_path, monkeypatch):
    wrong = []
    for number, block in enumerate(blocks_of(page)):
        folder = working_folder(tmp_path / str(number), monkeypatch)
        try:
            if block.language == "yaml":
                check_config(block, folder)
            elif block.language == "bash":
                check_commands(block, folder, monkeypatch)
            elif block.language == "python":
                compile(block.text, block.place, "exec")
        except (Exception, pytest.fail.Exception) as error:  # all blocks of the page are reported
            wrong.append(f"{block.place}: {error}")
    assert wrong == []


# --- links, contents, names


def headings_of(page: Path) -> list[str]:
    return re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)


def anchor(heading: str) -> str:
    """As GitHub makes it of a heading."""
    text = html.unescape(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading))
    return re.sub(r"[^\w\- ]", "", text).lower().replace(" ", "-")


def anchors_of(page: Path) -> list[str]:
    return [anchor(heading) for heading in headings_of(page)]


def links_of(page: Path) -> list[str]:
    """Relative links, of pictures too."""
    links = re.findall(r"\]\(([^)\s]+)\)", prose_of(page)) + re.findall(r"<img [^>]*src=\"([^\"]+)\"", prose_of(page))
    return [link for link in links if "://" not in link and not link.startswith("mailto:")]


def target_of(page: Path, link: str) -> tuple[Path, str]:
    path, _, name = link.partition("#")
    return (page.parent / path).resolve() if path else page, name


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere_and_headings_are_unique(page):
    wrong = []
    for link in links_of(page):
        target, name = target_of(page, link)
        if not target.exists() or (name and name not in anchors_of(target)):
            wrong.append(link)
    assert wrong == []
    anchors = anchors_of(page)
    assert [name for name in anchors if anchors.count(name) > 1] == []


def has_contents(page: Path) -> bool:
    """A guide, or a page that links to its own headings before the first."""
    return page.parent.name == "guide" or bool(
        re.search(r"^\* \[.+\]\(#", page.read_text().partition("\n## ")[0], re.M)
    )


@pytest.mark.parametrize("page", [page for page in PAGES if has_contents(page)], ids=named)
def test_a_guide_begins_with_a_title_a_sentence_and_its_contents(page):
    title, sentence, contents, *_ = page.read_text().split("\n\n")
    assert re.fullmatch(r"# .+", title)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    entries = re.findall(r"^ *\* \[(.+)\]\(#(.+)\)$", contents, re.MULTILINE)
    assert len(entries) == len(contents.splitlines())
    headings = re.findall(r"^## (.+)$", prose_of(page), re.MULTILINE)
    assert entries == [(heading, anchor(heading)) for heading in headings]


def test_every_page_is_reached_from_the_readme():
    assert len(links_of(ROOT / "README.md")) > 20
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            waiting += [target for link in links_of(page) if (target := target_of(page, link)[0]) in PAGES]
    assert [named(page) for page in PAGES if page not in reached] == []


@pytest.mark.parametrize("page", OURS, ids=named)
def test_files_and_settings_that_are_named_exist(page):
    text = page.read_text()
    files = re.findall(r"`(?:(?:bash|python) )?((?:deploy|tools|tests|lmtrain|configs)/[\w./-]+\w)[` ]", text)
    assert [name for name in files if not (ROOT / name).exists() and "mine" not in name] == []
    names = re.findall(rf"`(?:--)?((?:{'|'.join(SECTIONS)})\.[a-z_.]+[a-z])\b(?!\()", text)
    names = {name.removesuffix(".type") for name in names if not name.endswith(".py")}
    sections = {name.rpartition(".")[0] for name in SETTINGS} | {name.replace("[]", "") for name in SETTINGS}
    assert names - SETTINGS - sections - set(SECTIONS) - OTHER_NAMES == set()
