// A run of dense decoder layers: norm, q k v, rotary embedding, KV write, attention, output, norm, gated MLP.
#pragma once

#include "attention.h"
#include "linear.h"

namespace tierax {

struct Weights {
  const void* w;
  const float* scales;
  // Null: none.
  const float* bias;
  WeightType type;
};

struct Layer {
  const float *attn_norm, *mlp_norm;
  // f32 [head_dim]; null: q and k are not normalised.
  const float *q_norm, *k_norm;
  Weights qkv, o, gate_up, down;
  int64_t window;
};

// What a layer works on. Rows are tokens.
struct Stack {
  // [rows, width]: in and out
  float* x;
  // [rows, head_dim / 2]
  const float *cos, *sin;
  // Where the KV of each row goes.
  const int32_t* slots;
  // q and out of it are this stack's; so is the layer.
  Attention attention;
  char* pool;
  int64_t rows, width, inner;
  float eps;
  // Between the products: normed and product [rows, width], qkv [rows, qkv_width()], gate_up [rows, 2 * inner],
  // gated [rows, inner].
  float *normed, *product, *qkv, *gate_up, *gated;

  int64_t q_width() const { return attention.heads * attention.head_dim; }
  int64_t qkv_width() const { return q_width() + 2 * attention.kv_heads * attention.head_dim; }
};

}  // namespace tierax
