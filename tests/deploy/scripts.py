"""Shared by the tests of deploy/: its files, shellcheck, and the rule for command blocks in its pages."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent


def shellcheck(*arguments: object, text: str | None = None) -> None:
    """Fail with the findings of shellcheck. `text` is checked in place of files."""
    command = [BIN / "shellcheck", "--external-sources", "--severity=style", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def blocks(page: Path) -> list[tuple[str, str]]:
    """The page's bash blocks, each with the paragraph before it."""
    text = page.read_text()
    found = re.finditer(r"```bash\n(.*?)```", text, re.DOTALL)
    return [(text[: match.start()].rstrip().rpartition("\n\n")[2], match[1]) for match in found]


def needs(before: str) -> bool:
    """Whether the paragraph before a block states what it needs that a test machine does not have."""
    return bool(re.search(r"\*Needs [^*]{15,}\*:?$", before))
