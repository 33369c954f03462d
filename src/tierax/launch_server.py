"""`python -m tierax.launch_server …` is `tierax serve …`, for launch lines written for SGLang."""

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
