"""Write the demo corpus, the running Python's standard library, as JSONL: `python tools/demo_corpus.py [FOLDER]`.

Needs only Python.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))

from lmtrain.preprocess.prepare_demo import write_demo_corpus  # requires the path above

if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "demo"
    try:
        documents, size = write_demo_corpus(folder)
    except (ValueError, OSError) as error:
        print(f"demo_corpus: error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{folder}: {documents:,} documents, {size / 1e6:.1f} MB of Python source")
