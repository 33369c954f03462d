"""The compiler for TPUs, without any."""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# The library asks the cloud's metadata service where it runs, and locks the TPUs of the machine.
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-4"
os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
