// A run of native layers without Python or XLA, for builds with sanitizers: every buffer has exactly its size, KV that no
// row may see is NaN, and results are compared between numbers of threads, between all tokens at once and one after the
// other, and with layers computed in double.
#include <cmath>
#include <cstdio>
#include <deque>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "drivers.h"
#include "late_pool.h"
#include "layers_tasks.h"

using namespace tierax;

namespace {

constexpr int64_t kLayers = 2, kPageSize = 3;
constexpr float kEps = 1e-5f;

struct Shape {
  int64_t width, heads, kv_heads, head_dim, inner, tokens;
  bool bias, qk_norm;
  int64_t window;
};

// One sequence, whose tokens are all computed.
struct Case {
  Shape shape;
  KvType type;
  std::deque<std::vector<float>> floats;
  std::vector<Layer> layers;
  std::vector<float> x, cos, sin;
  std::vector<int32_t> slots, table;

  Case(Shape s, KvType type, std::mt19937& random) : shape(s), type(type), random_(random) {
    const int64_t q = s.heads * s.head_dim, qkv = q + 2 * s.kv_heads * s.head_dim;
    for (int64_t i = 0; i < kLayers; ++i) {
      Layer layer{};
      layer.attn_norm = numbers(s.width);
      layer.mlp_norm = numbers(s.width);
      if (s.qk_norm) layer.q_norm = numbers(s.head_dim), layer.k_norm = numbers(s.head_dim);
      layer.qkv = matrix(qkv, s.width);
      layer.o = matrix(s.width, q);
      layer.gate_up = matrix(2 * s.inner, s.width);
      layer.down = matrix(s.width, s.inner);
      layer.window = i ? s.window : 0;
      layers.push_back(layer);
    }
    for (int64_t i = 0; i < s.tokens * s.width; ++i) x.push_back(normal_(random));
    for (int64_t t = 0; t < s.tokens; ++t)
      for (int64_t i = 0; i < s.head_dim / 2; ++i) {
        const double angle = t * std::pow(100.0, -2.0 * i / s.head_dim);
        cos.push_back(float(std::cos(angle)));
        sin.push_back(float(std::sin(angle)));
      }
    table.resize((s.tokens + kPageSize - 1) / kPageSize);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), random);
    for (int64_t t = 0; t < s.tokens; ++t) slots.push_back(int32_t(table[t / kPageSize] * kPageSize + t % kPageSize));
  }

  const float* numbers(int64_t count, float size = 1) {
    floats.emplace_back();
    for (int64_t i = 0; i < count; ++i) floats.back().push_back(size * normal_(random_));
    return floats.back().data();
  }

  Weights matrix(int64_t n, int64_t k) {
    const float* w = numbers(n * k, 1 / std::sqrt(float(k)));
    return {w, nullptr, shape.bias ? numbers(n) : nullptr, WeightType::kF32};
  }

  // x behind the layers, computed in steps of so many tokens.
  std::vector<float> run(const Kernels& kernels, int threads, int64_t step) const {
    const Shape& s = shape;
    const int64_t row = type == KvType::kF32 ? 8 * s.head_dim : type == KvType::kBf16 ? 4 * s.head_dim : 2 * s.head_dim + 4;
    std::vector<char> pool(table.size() * kLayers * kPageSize * s.kv_heads * row, char(0xFF));
    std::vector<float> result;
    for (int64_t begin = 0; begin < s.tokens; begin += step) {
      const int64_t count = std::min(step, s.tokens - begin), half = s.head_dim / 2;
      std::vector<float> out(x.begin() + begin * s.width, x.begin() + (begin + count) * s.width);
      const std::vector<int32_t> starts{0, int32_t(count)}, lens{int32_t(begin + count)};
      Stack stack{};
      stack.attention = {nullptr, nullptr, pool.data(), type, s.heads, s.head_dim, kLayers, kPageSize, s.kv_heads, row,
                         0, 0, 0, 1 / std::sqrt(float(s.head_dim))};
      stack.x = out.data();
      stack.cos = cos.data() + begin * half;
      stack.sin = sin.data() + begin * half;
      stack.slots = slots.data() + begin;
      stack.pool = pool.data();
      stack.rows = count;
      stack.width = s.width;
      stack.inner = s.inner;
      stack.eps = kEps;
      const Batch batch{starts.data(), lens.data(), table.data(), 1, int64_t(table.size()), count};
      LatePool late(threads);
      Layers(kernels, late, stack, batch).run(layers.data(), kLayers);
      result.insert(result.end(), out.begin(), out.end());
    }
    return result;
  }

  std::vector<double> in_double() const;

 private:
  std::mt19937& random_;
  std::normal_distribution<float> normal_;
};

using Doubles = std::vector<double>;

Doubles normed(const double* x, const float* weight, int64_t width) {
  double squares = 0;
  for (int64_t i = 0; i < width; ++i) squares += x[i] * x[i];
  Doubles y;
  for (int64_t i = 0; i < width; ++i) y.push_back(x[i] / std::sqrt(squares / width + kEps) * weight[i]);
  return y;
}

Doubles times(const Doubles& x, const Weights& weights, int64_t n) {
  const float* w = static_cast<const float*>(weights.w);
  Doubles y;
  for (int64_t i = 0; i < n; ++i) {
    double sum = weights.bias ? weights.bias[i] : 0;
    for (size_t k = 0; k < x.size(); ++k) sum += x[k] * w[i * x.size() + k];
    y.push_back(sum);
  }
  return y;
}

Doubles Case::in_double() const {
  const Shape& s = shape;
  const int64_t half = s.head_dim / 2, q_width = s.heads * s.head_dim, kv_width = s.kv_heads * s.head_dim;
  Doubles out(x.begin(), x.end());
  for (const Layer& layer : layers) {
    std::vector<Doubles> rows;
    for (int64_t t = 0; t < s.tokens; ++t) {
      Doubles qkv = times(normed(&out[t * s.width], layer.attn_norm, s.width), layer.qkv, q_width + 2 * kv_width);
      for (int64_t h = 0; h < s.heads + s.kv_heads; ++h) {
        double* head = &qkv[h * s.head_dim];
        if (s.qk_norm) {
          const Doubles scaled = normed(head, h < s.heads ? layer.q_norm : layer.k_norm, s.head_dim);
          std::copy(scaled.begin(), scaled.end(), head);
        }
        for (int64_t i = 0; i < half; ++i) {
          const double a = head[i], b = head[i + half], c = cos[t * half + i], n = sin[t * half + i];
          head[i] = a * c - b * n;
          head[i + half] = b * c + a * n;
        }
      }
      rows.push_back(qkv);
    }
    for (int64_t t = 0; t < s.tokens; ++t) {
      Doubles attended;
      for (int64_t h = 0; h < s.heads; ++h) {
        const int64_t k = q_width + h / (s.heads / s.kv_heads) * s.head_dim;
        const int64_t first = layer.window ? std::max<int64_t>(t + 1 - layer.window, 0) : 0;
        Doubles mixed(s.head_dim);
        double total = 0;
        for (int64_t p = first; p <= t; ++p) {
          double score = 0;
          for (int64_t i = 0; i < s.head_dim; ++i) score += rows[t][h * s.head_dim + i] * rows[p][k + i];
          const double weight = std::exp(score / std::sqrt(double(s.head_dim)));
          total += weight;
          for (int64_t i = 0; i < s.head_dim; ++i) mixed[i] += weight * rows[p][k + kv_width + i];
        }
        for (double value : mixed) attended.push_back(value / total);
      }
      double* row = &out[t * s.width];
      const Doubles o = times(attended, layer.o, s.width);
      for (int64_t i = 0; i < s.width; ++i) row[i] += o[i];
      const Doubles gate_up = times(normed(row, layer.mlp_norm, s.width), layer.gate_up, 2 * s.inner);
      Doubles gated;
      for (int64_t i = 0; i < s.inner; ++i)
        gated.push_back(gate_up[i] / (1 + std::exp(-gate_up[i])) * gate_up[i + s.inner]);
      const Doubles down = times(gated, layer.down, s.width);
      for (int64_t i = 0; i < s.width; ++i) row[i] += down[i];
    }
  }
  return out;
}

bool check(const Kernels& kernels, const Case& c) {
  const std::vector<float> y = c.run(kernels, 1, c.shape.tokens);
  for (int threads : {1, 2, 5})
    for (int64_t step : {c.shape.tokens, int64_t{1}, int64_t{7}})
      if (c.run(kernels, threads, step) != y) {
        std::printf("%s, KV %d: %d threads, steps of %ld give other numbers\n", kernels.isa, int(c.type), threads, long(step));
        return false;
      }
  const Doubles exact = c.in_double();
  double off = 0, size = 0;
  for (size_t i = 0; i < y.size(); ++i) {
    off += std::pow(y[i] - exact[i], 2);
    size += exact[i] * exact[i];
  }
  const double allowed = c.type == KvType::kF32 ? 1e-5 : c.type == KvType::kBf16 ? 1e-2 : 1e-1;
  if (std::sqrt(off / size) < allowed) return true;
  std::printf("%s, KV %d: off by %g\n", kernels.isa, int(c.type), std::sqrt(off / size));
  return false;
}

}  // namespace

int main() {
  const Shape shapes[] = {{40, 4, 2, 16, 52, 23, false, false, 0},
                          {33, 3, 1, 10, 21, 19, true, true, 5},
                          {256, 4, 4, 64, 300, 9, true, false, 0}};
  return check_kernels([&](const Kernels& kernels, std::mt19937& random) {
    for (const Shape& shape : shapes)
      for (KvType type : {KvType::kF32, KvType::kBf16, KvType::kE4m3})
        if (!check(kernels, Case(shape, type, random))) return false;
    return true;
  });
}
