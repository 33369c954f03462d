// The kernels of one instruction set, and the set that this machine runs.
#pragma once

#include "attention.h"
#include "layers.h"
#include "linear.h"

namespace tierax {

struct Kernels {
  const char* isa;
  void (*linear)(const Linear&, int64_t n_begin, int64_t n_end);
  void (*attend)(const Attention&, const AttentionTask&, const AttentionTask* following, float* scratch);
  void (*join_attention)(const Attention&, const AttentionTask& first, int64_t segments, float* scratch);
  void (*add_and_norm)(const Stack&, const float* product, const float* bias, const float* weight, int64_t begin,
                       int64_t end);
  void (*place)(const Stack&, const Layer&, int64_t begin, int64_t end);
  void (*gate)(const Stack&, const Layer&, int64_t begin, int64_t end);
};

namespace avx512 {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace neon {
extern const Kernels kernels;
}
namespace plain {
extern const Kernels kernels;
}

const Kernels& kernels();

}  // namespace tierax
