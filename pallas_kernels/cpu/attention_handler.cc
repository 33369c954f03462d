// `attend` and `write_kv` as XLA calls them.
#include "handlers.h"
#include "kernels.h"

namespace tierax {
namespace {

using Scalar = ffi::BufferR0<ffi::S32>;
using Integers = ffi::BufferR1<ffi::S32>;

// q f32 [tokens, heads, head_dim]; kv: a pool as in pages.py; the batch as in batch.py. Gives f32 like q.
ffi::Error attend(ffi::ThreadPool pool, ffi::BufferR3<ffi::F32> q, ffi::AnyBuffer kv, Scalar layer, Integers q_starts,
                  Integers kv_lens, ffi::BufferR2<ffi::S32> page_table, Scalar num_rows, Scalar window, float soft_cap,
                  float scale, ffi::Result<ffi::BufferR3<ffi::F32>> out) {
  Attention args{};
  args.q = q.typed_data();
  args.out = out->typed_data();
  args.heads = q.dimensions()[1];
  args.head_dim = q.dimensions()[2];
  if (ffi::Error error = read_pool(kv, args); error.failure()) return error;
  args.layer = *layer.typed_data();
  args.window = std::max(*window.typed_data(), 0);
  args.soft_cap = soft_cap;
  args.scale = scale;
  if (args.layer < 0 || args.layer >= args.layers)
    return ffi::Error::InvalidArgument("attention: layer " + std::to_string(args.layer) + " is outside the pool");
  Batch batch;
  const int64_t pages = kv.dimensions()[0], tokens = q.dimensions()[0];
  if (ffi::Error error = read_batch(args, pages, tokens, q_starts, kv_lens, page_table, num_rows, batch);
      error.failure())
    return error;
  run_attention(kernels(), pool, args, batch);
  return ffi::Error::Success();
}

// Copies rows [tokens, ...] of any type to their slots of a layer. The pool is the result, the same memory.
ffi::Error write_kv(ffi::AnyBuffer pool, ffi::AnyBuffer rows, Integers slots, Scalar layer,
                    ffi::Result<ffi::AnyBuffer> out) {
  auto dims = pool.dimensions();
  int64_t tokens = slots.element_count(), layers = dims[1], page_size = dims[2];
  if (out->untyped_data() != pool.untyped_data())
    return ffi::Error::Internal("write_kv: XLA has given the result other memory than the pool");
  if (!tokens) return ffi::Error::Success();
  int64_t row_bytes = rows.size_bytes() / tokens;
  if (row_bytes * dims[0] * layers * page_size != int64_t(pool.size_bytes()))
    return ffi::Error::InvalidArgument("write_kv: rows are not as wide as the pool's");
  if (*layer.typed_data() < 0 || *layer.typed_data() >= layers)
    return ffi::Error::InvalidArgument("write_kv: layer " + std::to_string(*layer.typed_data()) + " is outside the pool");
  if (ffi::Error error = check_slots(slots.typed_data(), tokens, dims[0] * page_size); error.failure()) return error;
  for (int64_t t = 0; t < tokens; ++t) {
    int64_t slot = slots.typed_data()[t];
    int64_t row = (slot / page_size * layers + *layer.typed_data()) * page_size + slot % page_size;
    std::memcpy(static_cast<char*>(out->untyped_data()) + row * row_bytes,
                static_cast<const char*>(rows.untyped_data()) + t * row_bytes, row_bytes);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace tierax

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(tierax_attend, tierax::attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR3<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR2<ffi::S32>>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Attr<float>("soft_cap")
                                  .Attr<float>("scale")
                                  .Ret<ffi::BufferR3<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(tierax_write_kv, tierax::write_kv,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());
#pragma GCC visibility pop
