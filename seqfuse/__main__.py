"""`python -m seqfuse` is the command `seqfuse`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
