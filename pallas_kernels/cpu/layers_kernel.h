// What stands between a layer's products, for some of its rows. A row's result depends on that row alone.
#pragma once

#include "layers.h"
#include "simd.h"

namespace tierax::TIERAX_ISA {

// Calls body(k, count...) over all of a row: whole vectors first, then what is left with its count.
template <typename Body>
TIERAX_INLINE void over(int64_t width, const Body& body) {
  int64_t k = 0;
  for (; k + kWidth <= width; k += kWidth) body(k);
  if (k < width) body(k, width - k);
}

// Root mean square norm (Zhang and Sennrich, 2019); `to` may be `from`.
TIERAX_INLINE void norm(const float* from, const float* weight, float* to, int64_t width, float eps) {
  Vec squares{};
  over(width, [&](int64_t k, auto... count) {
    const Vec x = load(from + k, count...);
    squares = fma(x, x, squares);
  });
  const Vec scale = splat(1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(width) + eps));
  over(width, [&](int64_t k, auto... count) {
    store(to + k, load(from + k, count...) * scale * load(weight + k, count...), count...);
  });
}

TIERAX_INLINE void add(float* to, const float* from, int64_t width) {
  over(width, [&](int64_t k, auto... count) { store(to + k, load(to + k, count...) + load(from + k, count...), count...); });
}

// Adds a product to x, if there is one, and normalises x for the next one, if there is one.
inline void add_and_norm(const Stack& stack, const float* product, const float* bias, const float* weight,
                         int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    float* x = stack.x + row * stack.width;
    if (product) add(x, product + row * stack.width, stack.width);
    if (bias) add(x, bias, stack.width);
    if (weight) norm(x, weight, stack.normed + row * stack.width, stack.width, stack.eps);
  }
}

// Rotary embedding of one head, halves against each other (Su et al., 2021); `to` may be `from`.
TIERAX_INLINE void rotate(const float* from, const float* cos, const float* sin, float* to, int64_t half) {
  over(half, [&](int64_t k, auto... count) {
    const Vec a = load(from + k, count...), b = load(from + half + k, count...);
    const Vec c = load(cos + k, count...), s = load(sin + k, count...);
    store(to + k, a * c - b * s, count...);
    store(to + half + k, b * c + a * s, count...);
  });
}

// To the nearest, ties to even.
inline uint16_t to_bf16(float value) {
  const uint32_t bits = bits_of<uint32_t>(value);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// See `quant.encode`.
inline uint8_t to_e4m3(float value) {
  const float size = __builtin_fabsf(value), magnitude = size < 448.0f ? size : 448.0f;
  const uint32_t bits = bits_of<uint32_t>(magnitude);
  const uint32_t normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3);
  const uint32_t small = bits_of<uint32_t>(magnitude + 0x1p14f) & 0xF;
  return static_cast<uint8_t>((magnitude < 0x1p-6f ? small : normal) | (bits_of<uint32_t>(value) >> 24 & 0x80));
}

// K or V of one head as codes; returns their scale, see `quant.quantize_kv`.
inline uint16_t quantize(const float* from, char* to, int64_t head_dim) {
  float largest = 0x1p-100f;
  bool number = true;
  for (int64_t i = 0; i < head_dim; ++i) {
    const float size = __builtin_fabsf(from[i]);
    number &= size == size;
    largest = size > largest ? size : largest;
  }
  largest = largest < 0x1p127f ? largest : 0x1p127f;
  const uint16_t scale = number ? to_bf16(largest / 448.0f) : 0x7FC0;
  const float divisor = bits_of<float>(uint32_t{scale} << 16);
  for (int64_t i = 0; i < head_dim; ++i) to[i] = static_cast<char>(to_e4m3(from[i] / divisor));
  return scale;
}

// K and V of one head into a row of the pool, see pages.py and quant.py.
inline void put(const Attention& args, const float* k, const float* v, char* row) {
  const int64_t head_dim = args.head_dim;
  switch (args.type) {
    case KvType::kF32:
      std::memcpy(row, k, sizeof(float) * head_dim);
      std::memcpy(row + sizeof(float) * head_dim, v, sizeof(float) * head_dim);
      return;
    case KvType::kBf16:
      for (int64_t i = 0; i < 2 * head_dim; ++i) {
        const uint16_t bits = to_bf16(i < head_dim ? k[i] : v[i - head_dim]);
        std::memcpy(row + 2 * i, &bits, 2);
      }
      return;
    case KvType::kE4m3:
      const uint16_t scales[] = {quantize(k, row, head_dim), quantize(v, row + head_dim, head_dim)};
      std::memcpy(row + 2 * head_dim, scales, sizeof(scales));
  }
}

// Finishes q, k and v of some rows: q for attention, k and v in the pool.
inline void place(const Stack& stack, const Layer& layer, int64_t begin, int64_t end) {
  const Attention& args = stack.attention;
  const int64_t head_dim = args.head_dim, half = head_dim / 2;
  for (int64_t row = begin; row < end; ++row) {
    float* qkv = stack.qkv + row * stack.qkv_width();
    if (layer.qkv.bias) add(qkv, layer.qkv.bias, stack.qkv_width());
    const float *cos = stack.cos + row * half, *sin = stack.sin + row * half;
    float* q = const_cast<float*>(args.q) + row * stack.q_width();
    for (int64_t h = 0; h < args.heads; ++h) {
      float* from = qkv + h * head_dim;
      if (layer.q_norm) norm(from, layer.q_norm, from, head_dim, stack.eps);
      rotate(from, cos, sin, q + h * head_dim, half);
    }
    const int64_t slot = stack.slots[row], page_size = args.page_size;
    const int64_t line = (slot / page_size * args.layers + args.layer) * page_size + slot % page_size;
    float *k = qkv + stack.q_width(), *v = k + args.kv_heads * head_dim;
    for (int64_t h = 0; h < args.kv_heads; ++h, k += head_dim, v += head_dim) {
      if (layer.k_norm) norm(k, layer.k_norm, k, head_dim, stack.eps);
      rotate(k, cos, sin, k, half);
      put(args, k, v, stack.pool + (line * args.kv_heads + h) * args.row_bytes);
    }
  }
}

// silu(gate) * up
inline void gate(const Stack& stack, const Layer& layer, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    float* gate = stack.gate_up + row * 2 * stack.inner;
    if (layer.gate_up.bias) add(gate, layer.gate_up.bias, 2 * stack.inner);
    const float* up = gate + stack.inner;
    over(stack.inner, [&](int64_t k, auto... count) {
      const Vec g = load(gate + k, count...);
      store(stack.gated + row * stack.inner + k, g / (1.0f + exp(-g)) * load(up + k, count...), count...);
    });
  }
}

}  // namespace tierax::TIERAX_ISA
