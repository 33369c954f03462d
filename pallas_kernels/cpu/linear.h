// y[m, n] = sum over k of x[m, k] * w[n, k]
#pragma once

#include "isa.h"

namespace tierax {

// Numbers that share a scale in a row of int8 weights.
constexpr int64_t kGroup = 64;

enum class WeightType { kF32, kBf16, kInt8 };

struct Linear {
  const float* x;
  const void* w;
  // Of int8 weights: [n, ceil(k / kGroup)].
  const float* scales;
  float* y;
  int64_t m, n, k;
  WeightType type;
};


}  // namespace tierax
