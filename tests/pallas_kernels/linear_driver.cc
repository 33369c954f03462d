// The native product without Python or XLA, for builds with sanitizers: every buffer has exactly its size, results start
// as NaN, and are compared with sums in double and between numbers of threads.
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

#include "drivers.h"
#include "late_pool.h"
#include "linear_tasks.h"

using namespace tierax;

namespace {

struct Case {
  std::vector<float> x, w32, scales;
  std::vector<bf16> w16;
  std::vector<int8_t> w8;
  Linear args;

  Case(int64_t m, int64_t n, int64_t k, WeightType type, std::mt19937& random) : args{} {
    const int64_t groups = (k + kGroup - 1) / kGroup;
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < m * k; ++i) x.push_back(normal(random));
    for (int64_t i = 0; i < n * k; ++i) {
      if (type == WeightType::kF32) w32.push_back(normal(random));
      if (type == WeightType::kBf16) w16.push_back({static_cast<uint16_t>(0x3F00 + random() % 256 + (random() % 2 << 15))});
      if (type == WeightType::kInt8) w8.push_back(static_cast<int8_t>(random() % 255 - 127));
    }
    for (int64_t i = 0; i < n * groups && type == WeightType::kInt8; ++i) scales.push_back(std::fabs(normal(random)));
    const void* w = type == WeightType::kF32 ? static_cast<const void*>(w32.data())
                    : type == WeightType::kBf16 ? static_cast<const void*>(w16.data())
                                                : w8.data();
    args = {x.data(), w, scales.data(), nullptr, m, n, k, type};
  }

  double weight(int64_t n, int64_t k) const {
    const int64_t i = n * args.k + k;
    if (args.type == WeightType::kF32) return w32[i];
    if (args.type == WeightType::kInt8) return w8[i] * double(scales[n * ((args.k + kGroup - 1) / kGroup) + k / kGroup]);
    uint32_t bits = uint32_t{w16[i].bits} << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
};

std::vector<float> product(const Kernels& kernels, Linear args, int threads) {
  std::vector<float> y(args.m * args.n, std::numeric_limits<float>::quiet_NaN());
  args.y = y.data();
  LatePool pool(threads);
  run_linear(kernels, pool, args);
  // A copy: it reads what helpers wrote before they are joined, when only the loop's own order has made it visible.
  return std::vector<float>(y);
}

bool check(const Kernels& kernels, const Case& c) {
  const Linear& a = c.args;
  const std::vector<float> y = product(kernels, a, 1);
  for (int64_t i = 0; i < a.m * a.n; ++i) {
    double exact = 0, size = 0;
    for (int64_t k = 0; k < a.k; ++k) {
      const double term = c.x[i / a.n * a.k + k] * c.weight(i % a.n, k);
      exact += term;
      size += std::fabs(term);
    }
    if (!(std::fabs(y[i] - exact) <= size * (a.k / 4.0 + 8) * 0x1p-24)) {
      std::printf("%s, weights %d, [%ld, %ld, %ld]: y[%ld] is %g, not %g\n", kernels.isa, int(a.type), long(a.m), long(a.n),
                  long(a.k), long(i), y[i], exact);
      return false;
    }
  }
  for (int threads : {2, 5}) {
    if (std::memcmp(product(kernels, a, threads).data(), y.data(), y.size() * sizeof(float)) != 0) {
      std::printf("%s: %d threads give other numbers\n", kernels.isa, threads);
      return false;
    }
  }
  return true;
}

}  // namespace

int main() {
  const int64_t shapes[][3] = {{1, 1, 1},   {1, 700, 65},  {2, 13, 7},   {3, 5, 64},   {4, 3, 129},  {5, 12, 31},
                               {7, 37, 40}, {8, 1500, 64}, {16, 50, 90}, {33, 80, 33}, {67, 90, 131}, {70, 20, 2100}};
  return check_kernels([&](const Kernels& kernels, std::mt19937& random) {
    for (auto& [m, n, k] : shapes)
      for (WeightType type : {WeightType::kF32, WeightType::kBf16, WeightType::kInt8})
        if (!check(kernels, Case(m, n, k, type, random))) return false;
    return true;
  });
}
