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
    checks = [
        ["ruff", "format"] if fix else ["ruff", "format", "--check"],
        ["ruff", "check", "--fix"] if fix else ["ruff", "check"],
        ["mypy"],
        ["lint-imports"],
        ["python", "tools/size.py"],
    ]
    failed = []
    for check in checks:
        print("$", *check, flush=True)
        if subprocess.run([os.path.join(BIN, check[0]), *check[1:]], cwd=ROOT).returncode:
            failed.append(" ".join(check))
    print("failed: " + ", ".join(failed) if failed else "all checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
