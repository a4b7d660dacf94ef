"""`python -m lmtrain` is the same as `lmtrain`."""

from lmtrain.cli import main

if __name__ == "__main__":
    main()
