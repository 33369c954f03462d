// All layers of a step as XLA calls them. Behind the fixed arguments come the parameters of each layer, one layer after
// the other, in the order of `read_layer`.
#include <vector>

#include "handlers.h"
#include "layers_tasks.h"

namespace tierax {
namespace {

using Integers = ffi::BufferR1<ffi::S32>;
using Rows = ffi::BufferR2<ffi::F32>;

// Takes one argument after the other; the first error stays.
class Reader {
 public:
  explicit Reader(ffi::RemainingArgs args) : args_(args) {}

  const float* vector(bool there, int64_t width) {
    if (!there) return nullptr;
    auto buffer = next();
    if (error_.failure()) return nullptr;
    if (buffer->element_type() != ffi::F32 || static_cast<int64_t>(buffer->element_count()) != width) {
      error_ = ffi::Error::InvalidArgument("layers: a vector of f32 has another width than its layer");
      return nullptr;
    }
    return buffer->typed_data<float>();
  }

  Weights matrix(bool has_bias, int64_t n, int64_t k) {
    Weights weights{};
    auto buffer = next();
    if (error_.failure()) return weights;
    const auto shape = buffer->dimensions();
    if (shape.size() != 2 || shape[0] != n || shape[1] != k) {
      error_ = ffi::Error::InvalidArgument("layers: a matrix has another shape than its layer");
      return weights;
    }
    weights.w = buffer->untyped_data();
    error_ = read_type(*buffer, weights.type);
    if (error_.success() && weights.type == WeightType::kInt8)
      error_ = read_scales(args_.get<ffi::AnyBuffer>(at_++), n, k, weights.scales);
    if (error_.success()) weights.bias = vector(has_bias, n);
    return weights;
  }

  ffi::Error end() {
    if (error_.success() && at_ != args_.size()) return ffi::Error::InvalidArgument("layers: too many parameters");
    return error_;
  }

 private:
  ffi::ErrorOr<ffi::AnyBuffer> next() {
    auto buffer = args_.get<ffi::AnyBuffer>(at_++);
    if (error_.success() && !buffer.has_value()) error_ = ffi::Error::InvalidArgument("layers: too few parameters");
    return buffer;
  }

  ffi::RemainingArgs args_;
  size_t at_ = 0;
  ffi::Error error_ = ffi::Error::Success();
};

struct Optional {
  bool qk_norm, qkv_bias, o_bias, mlp_bias;
};

Layer read_layer(Reader& reader, const Stack& stack, const Optional& has) {
  const int64_t head_dim = stack.attention.head_dim, width = stack.width;
  Layer layer{};
  layer.attn_norm = reader.vector(true, width);
  layer.qkv = reader.matrix(has.qkv_bias, stack.qkv_width(), width);
  layer.q_norm = reader.vector(has.qk_norm, head_dim);
  layer.k_norm = reader.vector(has.qk_norm, head_dim);
  layer.o = reader.matrix(has.o_bias, width, stack.q_width());
  layer.mlp_norm = reader.vector(true, width);
  layer.gate_up = reader.matrix(has.mlp_bias, 2 * stack.inner, width);
  layer.down = reader.matrix(has.mlp_bias, width, stack.inner);
  return layer;
}

// x f32 [tokens, width]; a pool as in pages.py, which is the second result, the same memory; slots of the tokens; cos and
// sin [tokens, head_dim / 2]; the batch as in batch.py; windows [layers]. Padding tokens are left as they are.
ffi::Error call(ffi::ThreadPool threads, Rows x, ffi::AnyBuffer kv, Integers slots, Rows cos, Rows sin,
                Integers q_starts, Integers kv_lens, ffi::BufferR2<ffi::S32> page_table, ffi::BufferR0<ffi::S32> num_rows,
                Integers windows, ffi::RemainingArgs parameters, int64_t heads, int64_t head_dim, int64_t inner, float eps,
                bool qk_norm, bool qkv_bias, bool o_bias, bool mlp_bias, ffi::Result<Rows> out,
                ffi::Result<ffi::AnyBuffer> pool) {
  if (pool->untyped_data() != kv.untyped_data())
    return ffi::Error::Internal("layers: XLA has given the result other memory than the pool");
  const int64_t tokens = x.dimensions()[0];
  Stack stack{};
  Attention& args = stack.attention;
  args.heads = heads;
  args.head_dim = head_dim;
  args.scale = static_cast<float>(1 / __builtin_sqrt(static_cast<double>(head_dim)));
  if (ffi::Error error = read_pool(kv, args); error.failure()) return error;
  const int64_t count = windows.element_count();
  if (count != args.layers) return ffi::Error::InvalidArgument("layers: not as many as the pool has");
  Batch batch;
  const int64_t pages = kv.dimensions()[0];
  if (ffi::Error error = read_batch(args, pages, tokens, q_starts, kv_lens, page_table, num_rows, batch); error.failure())
    return error;
  batch.tokens = stack.rows = batch.rows ? batch.q_starts[batch.rows] : 0;
  if (slots.element_count() < size_t(stack.rows) || cos.dimensions()[0] != tokens || sin.dimensions()[0] != tokens ||
      2 * cos.dimensions()[1] != head_dim || 2 * sin.dimensions()[1] != head_dim)
    return ffi::Error::InvalidArgument("layers: slots and angles are not those of x");
  if (ffi::Error error = check_slots(slots.typed_data(), stack.rows, pages * args.page_size); error.failure())
    return error;
  stack.x = out->typed_data();
  stack.cos = cos.typed_data();
  stack.sin = sin.typed_data();
  stack.slots = slots.typed_data();
  stack.pool = static_cast<char*>(pool->untyped_data());
  stack.width = x.dimensions()[1];
  stack.inner = inner;
  stack.eps = eps;

  Reader reader(parameters);
  std::vector<Layer> layers;
  for (int64_t i = 0; i < count; ++i) {
    layers.push_back(read_layer(reader, stack, {qk_norm, qkv_bias, o_bias, mlp_bias}));
    layers.back().window = std::max(windows.typed_data()[i], 0);
  }
  if (ffi::Error error = reader.end(); error.failure()) return error;
  std::memcpy(stack.x, x.typed_data(), x.size_bytes());
  if (stack.rows) Layers(kernels(), threads, stack, batch).run(layers.data(), count);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace tierax

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(tierax_layers, tierax::call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR2<ffi::S32>>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .RemainingArgs()
                                  .Attr<int64_t>("heads")
                                  .Attr<int64_t>("head_dim")
                                  .Attr<int64_t>("inner")
                                  .Attr<float>("eps")
                                  .Attr<bool>("qk_norm")
                                  .Attr<bool>("qkv_bias")
                                  .Attr<bool>("o_bias")
                                  .Attr<bool>("mlp_bias")
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>());
#pragma GCC visibility pop
