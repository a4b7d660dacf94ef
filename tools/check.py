"""Static checks: format, lint, types, import contracts, files and lines within the budget.

`python tools/check.py` checks; `python tools/check.py --fix` first formats and applies automatic fixes.
"""

import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BIN = os.path.join(ROOT, ".venv", "bin")


def main() -> int:
    subprocess.run(["bash", "tools/install.sh", "dev"], cwd=ROOT, check=True)
    fix = "--fix" in sys.argv[1:]
    ruff = [
        ["ruff", "format"] if fix else ["ruff", "format", "--check"],
        ["ruff", "check", "--fix"] if fix else ["ruff", "check"],
    ]
    failed = []
    # those that change files first, then the others at the same time
    for together in ([ruff[0]], [ruff[1]], [["mypy"], ["lint-imports"], ["python", "tools/size.py"]]):
        started = [(check, start(check)) for check in together]
        for check, process in started:
            printed = process.communicate()[0]
            print("$", *check, f"\n{printed}", end="", flush=True)
            if process.returncode:
                failed.append(" ".join(check))
    print("failed: " + ", ".join(failed) if failed else "all checks passed")
    return 1 if failed else 0


def start(check: list[str]) -> subprocess.Popen[str]:
    command = [os.path.join(BIN, check[0]), *check[1:]]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


if __name__ == "__main__":
    sys.exit(main())
