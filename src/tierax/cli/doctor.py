"""`tierax doctor`: what an installation runs on, and which kernels would serve a model here, with the reasons."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from .option import Parser

if TYPE_CHECKING:
    from ..pallas_kernels.kernels import AttentionShape, Target


def run(argv: list[str]) -> int:
    """Prints the report and returns 0."""
    parser = Parser("tierax doctor", "Tell what this installation runs on, and which kernels serve.")
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a model whose shapes decide among the kernels; without one: 32 heads of 128, 8 of them for KV",
    )
    args = parser.parse_args(argv)
    for title, text in report(args.model):
        print(f"{title:<16}{text}")
    return 0


def report(model: str | None) -> list[tuple[str, str]]:
    """Lines of the report: what, and how it stands. Raises `ModelError` for a model that cannot be opened."""
    import jax

    from .. import __version__
    from ..engine.platform import device_target
    from ..pallas_kernels import attention

    target = device_target()
    shape = _shape(model, target)
    refusals = attention.refusals(target, shape)
    kernels = attention.select(target, shape)
    device = jax.local_devices()[0]
    lines = [
        ("tierax", f"{__version__}, Python {platform.python_version()}, jax {jax.__version__}"),
        (
            "device",
            f"{target.platform}: {jax.local_device_count()} x {device.device_kind}, {platform.machine()}",
        ),
        ("kernels", f"{kernels.summary}, by --attention-backend auto"),
    ]
    for name, reason in refusals.items():
        fit = "in use" if name == kernels.name else "would serve"
        lines.append(("", f"{name}: {fit if reason is None else reason}"))
    lines.append(("native library", _native_library(target)))
    return lines


def _shape(model: str | None, target: Target) -> AttentionShape:
    from ..engine.platform import PLATFORMS
    from ..models.source import resolve_model
    from ..models.transformer import attention_shape
    from ..pallas_kernels.kernels import AttentionShape

    usual = PLATFORMS.get(target.platform, PLATFORMS["default"])
    if model is None:
        return AttentionShape(32, 8, 128, usual.page_size, usual.dtype, usual.dtype)
    return attention_shape(resolve_model(model).config, usual.page_size, usual.dtype, usual.dtype)


def _native_library(target: Target) -> str:
    from ..pallas_kernels.cpu.library import PATH, library

    if target.platform != "cpu":
        return "for CPUs only"
    return library().absence or f"{library().isa}, {PATH}"
