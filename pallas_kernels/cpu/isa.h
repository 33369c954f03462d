// The instruction sets that kernels are compiled for, one namespace each. This header and those of the kernels include
// no library code beyond <cstdint> and <cstring>: an inline function of the standard library compiled with AVX-512 here
// could be the copy that the linker keeps for a CPU without it.
#pragma once

#include <cstdint>
#include <cstring>

#define TIERAX_INLINE __attribute__((always_inline)) inline

namespace tierax {

struct bf16 {
  uint16_t bits;
};

// A code of `quant.py`: 4 bits of exponent, 3 of mantissa, no infinities.
struct e4m3 {
  uint8_t bits;
};

}  // namespace tierax
