"""The compiler for NVIDIA GPUs, without any."""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Tuning would run candidates on the GPU.
os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
