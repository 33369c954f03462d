// Runs layers on a pool of threads, one part after the other. Between two parts no thread goes to sleep.
#pragma once

#include "attention_tasks.h"
#include "layers.h"
#include "linear_tasks.h"

namespace tierax {

// What stands between products takes about a microsecond per row.
constexpr int64_t kRowsPerTask = 8;

template <typename Pool>
class Layers {
 public:
  Layers(const Kernels& kernels, Pool& pool, const Stack& stack, const Batch& batch)
      : kernels_(kernels), pool_(pool), stack_(stack), batch_(batch) {
    const int64_t rows = stack.rows;
    const int64_t activations = padded(rows * stack.width), q = padded(rows * stack.q_width());
    const int64_t qkv = padded(rows * stack.qkv_width()), inner = padded(rows * stack.inner);
    memory_ = floats(2 * activations + std::max(qkv + 2 * q, 3 * inner));
    stack_.normed = memory_.get();
    stack_.product = stack_.normed + activations;
    // What attention needs and what the MLP needs are not needed at once.
    stack_.qkv = stack_.gate_up = stack_.product + activations;
    stack_.gated = stack_.gate_up + 2 * inner;
    stack_.attention.q = stack_.qkv + qkv;
    stack_.attention.out = stack_.qkv + qkv + q;
  }

  void run(const Layer* layers, int64_t count) {
    const float *product = nullptr, *bias = nullptr;
    for (int64_t i = 0; i < count; ++i) {
      const Layer& layer = layers[i];
      Attention& attention = stack_.attention;
      attention.layer = i;
      attention.window = layer.window;
      add_and_norm(product, bias, layer.attn_norm);
      multiply(stack_.normed, layer.qkv, stack_.qkv, stack_.width, stack_.qkv_width());
      over_rows([&](int64_t begin, int64_t end) { kernels_.place(stack_, layer, begin, end); });
      run_attention(kernels_, pool_, attention, batch_);
      multiply(attention.out, layer.o, stack_.product, stack_.q_width(), stack_.width);
      add_and_norm(stack_.product, layer.o.bias, layer.mlp_norm);
      multiply(stack_.normed, layer.gate_up, stack_.gate_up, stack_.width, 2 * stack_.inner);
      over_rows([&](int64_t begin, int64_t end) { kernels_.gate(stack_, layer, begin, end); });
      multiply(stack_.gated, layer.down, stack_.product, stack_.inner, stack_.width);
      product = stack_.product;
      bias = layer.down.bias;
    }
    add_and_norm(product, bias, nullptr);
  }

 private:
  void add_and_norm(const float* product, const float* bias, const float* weight) {
    over_rows([&](int64_t begin, int64_t end) { kernels_.add_and_norm(stack_, product, bias, weight, begin, end); });
  }

  void multiply(const float* x, const Weights& weights, float* y, int64_t k, int64_t n) {
    run_linear(kernels_, pool_, Linear{x, weights.w, weights.scales, y, stack_.rows, n, k, weights.type});
  }

  template <typename Body>
  void over_rows(const Body& body) {
    parallel_for(pool_, (stack_.rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
      body(task * kRowsPerTask, std::min((task + 1) * kRowsPerTask, stack_.rows));
    });
  }

  const Kernels& kernels_;
  Pool& pool_;
  Stack stack_;
  const Batch& batch_;
  Floats memory_;
};

}  // namespace tierax
