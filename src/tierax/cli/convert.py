"""`tierax convert`: a Hugging Face directory or a GGUF file becomes an Orbax checkpoint that restores sharded."""

from __future__ import annotations

import sys
from pathlib import Path

from .option import Parser


def run(argv: list[str]) -> int:
    """Writes the checkpoint and returns 0; the destination appears only once it is complete."""
    parser = Parser("tierax convert", "Convert a model to an Orbax checkpoint.")
    parser.add_argument("source", metavar="MODEL", help="a Hugging Face directory, a .gguf file, or demo")
    parser.add_argument(
        "destination", metavar="DIR", type=Path, help="where to write; must not exist, or be empty"
    )
    parser.add_argument(
        "--dtype", choices=("f32", "bf16"), default="f32", help="f32 keeps every value; bf16 is half the size"
    )
    args = parser.parse_args(argv)

    from ..engine.tokenizer import Tokenizer
    from ..models.source import resolve_model
    from ..models.weights.orbax import convert

    source = resolve_model(args.source)
    # A GGUF file keeps its tokenizer in its metadata; a directory's tokenizer files are copied as they are.
    write_tokenizer = Tokenizer.from_gguf(source.raw).save if source.kind == "gguf" else None
    destination = args.destination.expanduser()
    convert(
        source, destination, dtype=args.dtype, write_tokenizer=write_tokenizer, progress=sys.stderr.isatty()
    )
    print(f"wrote {destination}", file=sys.stderr)
    return 0
