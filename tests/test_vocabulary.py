"""Words that the glossary replaced may not return: one term for one thing, the term that people search for."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Not ours, or input of tests.
EXCLUDED = ("LICENSE", "tests/corpus/", "tests/golden/", "tests/reference/", "tests/test_vocabulary.py")
# A regular expression for one or more words, in any case, and what to write instead.
REPLACEMENTS = {
    "anew|afresh": "again, from scratch, a new run",
    "go(es)? on|going on|went on|gone on": "resume, continue",
    "(is|are|was|were|be|been|being) told": "is logged, reported, warned",
    "tells": "reports, prints",
    "mend(s|ed|ing)?": "fix",
    "beside": "next to, alongside, in addition to, during",
    "so (many|much)(?! that)": "N, the number of",
    "for so long": "for the timeout",
    "by (itself|themselves)": "automatically, alone",
    "for want of": "without, because of missing",
    "not to be had": "not found, unavailable",
    "(has|have|had) no use for": "ignores",
    "(bring|brings|brought) along": "include, bundle",
    "what comes and goes": "temporary buffers",
    "stretch(es)?": "block, window",
    "(a|has|have|had|is|was|were|be) begun": "started",
    "by arithmetic": "estimated",
    "no .{1,30} is known (of|for)": "unknown ...",
    "of no (more )?use": "ignored, unused",
    "in vain": "without effect",
    "(has|have|had) other bytes": "checksum mismatch",
    "(file|checkpoint|shard|one) is whole": "is complete, valid",
    "for ever": "indefinitely",
    "the house": "the repository",
    "lies (there|in|at|beside)": "is stored in",
    "(is|was|be) kept there": "is stored in",
    "(takes?|left|from) what is there": "existing ...",
    "(is|are|be|was) tried again": "retry",
    "comes? to rest": "decay steps",
    "wants": "requires, expects",
    "that which": "what, the one that",
    "of one's own": "your own, custom, separate",
    "(stand|stands|standing|stood) still": "hang",
    "leav(e|es|ing) (it|them) behind": "abandon",
}


def test_no_replaced_word_returns():
    """Checks all tracked text, names of tests too, except the open work in the build notes."""
    listed = subprocess.run(["git", "grep", "-Il", ""], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = []
    any_of_them = re.compile(rf"\b({'|'.join(REPLACEMENTS)})\b", re.IGNORECASE)
    for name in (name for name in listed.splitlines() if not name.startswith(EXCLUDED)):
        text = (ROOT / name).read_text().partition("\n## In progress\n")[0].replace("_", " ")
        if not any_of_them.search(text):
            continue
        for words, replacement in REPLACEMENTS.items():
            for match in re.finditer(rf"\b({words})\b", text, re.IGNORECASE):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{name}:{line}: {match[0]!r}: write {replacement!r}")
    assert not found, "\n".join(found)
