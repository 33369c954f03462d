"""NVIDIA GPUs as the compiler is told of them. Figures are from NVIDIA's data sheets and programming guide."""

from __future__ import annotations

from functools import cache

from jax.experimental.topologies import get_topology_desc

from aot.programs import Chip
from tierax.pallas_kernels.kernels import Target

_DESCRIPTION = """
gpu_device_info {{
  name: "{name}" device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ {capability} }}
  core_count: {cores} fpus_per_core: {units} clock_rate_ghz: {clock}
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: {core_shared} shared_memory_per_block: 49152 shared_memory_per_block_optin: {block_shared}
  l2_cache_size: {l2} memory_bandwidth: {bandwidth} device_memory_size: {memory}
  driver_version: "13.0.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}}
platform_name: "CUDA"
device_description_str: "{name}"
dnn_version_info {{ major: 9 minor: 10 }}
"""
_CHIPS = {
    "H100": {
        "name": "NVIDIA H100 80GB HBM3",
        # Warpgroup matrix products are among the features that only 9.0 itself has.
        "capability": "major: 9 feature_extension: ACCELERATED_FEATURES",
        "cores": 132,
        "units": 128,
        "clock": 1.98,
        "core_shared": 228 << 10,
        "block_shared": 227 << 10,
        "l2": 50 << 20,
        "bandwidth": 3_350_000_000_000,
        "memory": 80 << 30,
    },
    "A100": {
        "name": "NVIDIA A100-SXM4-80GB",
        "capability": "major: 8",
        "cores": 108,
        "units": 64,
        "clock": 1.41,
        "core_shared": 164 << 10,
        "block_shared": 163 << 10,
        "l2": 40 << 20,
        "bandwidth": 2_039_000_000_000,
        "memory": 80 << 30,
    },
}
_CAPABILITIES = {"H100": "9.0", "A100": "8.0"}
MEMORY = 60 << 30
"""Of 80 GiB: jax's allocator takes three quarters of a GPU's memory unless it is told otherwise."""


@cache
def chip(name: str) -> Chip:
    """Four GPUs of a kind in one host."""
    topology = get_topology_desc(
        platform="cuda", topology_name="", topology="1x1x4", target_config=_DESCRIPTION.format(**_CHIPS[name])
    )
    return Chip(name, Target("gpu", _CAPABILITIES[name]), MEMORY, topology.devices)
