// `attend` and `write_kv` as XLA calls them.
#include "attention_tasks.h"
#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tierax {
namespace {

using Scalar = ffi::BufferR0<ffi::S32>;
using Integers = ffi::BufferR1<ffi::S32>;

// q f32 [tokens, heads, head_dim]; kv: a pool as in pages.py; the batch as in batch.py. Gives f32 like q.
ffi::Error attend(ffi::ThreadPool pool, ffi::BufferR3<ffi::F32> q, ffi::AnyBuffer kv, Scalar layer, Integers q_starts,
                  Integers kv_lens, ffi::BufferR2<ffi::S32> page_table, Scalar num_rows, Scalar window, float soft_cap,
                  float scale, ffi::Result<ffi::BufferR3<ffi::F32>> out) {
  Attention args{};
  switch (kv.element_type()) {
    case ffi::F32: args.type = KvType::kF32; break;
    case ffi::BF16: args.type = KvType::kBf16; break;
    case ffi::U8: args.type = KvType::kE4m3; break;
    default: return ffi::Error::InvalidArgument("attention: a pool is f32, bf16 or u8");
  }
  auto q_dims = q.dimensions(), kv_dims = kv.dimensions();
  args.q = q.typed_data();
  args.out = out->typed_data();
  args.pool = static_cast<const char*>(kv.untyped_data());
  args.heads = q_dims[1];
  args.head_dim = q_dims[2];
  args.layers = kv_dims[1];
  args.page_size = kv_dims[2];
  args.kv_heads = kv_dims.size() == 5 ? kv_dims[3] : 1;
  args.row_bytes = kv_dims.back() * int64_t(ffi::ByteWidth(kv.element_type()));
  args.layer = *layer.typed_data();
  args.window = std::max(*window.typed_data(), 0);
  args.soft_cap = soft_cap;
  args.scale = scale;
  Batch batch{q_starts.typed_data(), kv_lens.typed_data(),       page_table.typed_data(),
              *num_rows.typed_data(), page_table.dimensions()[1], q_dims[0]};
  int64_t scales = args.type == KvType::kE4m3 ? 4 : 0;
  if (args.row_bytes != 2 * args.head_dim * int64_t(ffi::ByteWidth(kv.element_type())) + scales || !args.kv_heads ||
      args.heads % args.kv_heads)
    return ffi::Error::InvalidArgument("attention: the heads of q and those of the pool do not match");
  if (args.layer < 0 || args.layer >= args.layers)
    return ffi::Error::InvalidArgument("attention: layer " + std::to_string(args.layer) + " is outside the pool");
  if (batch.rows < 0 || batch.rows > kv_lens.dimensions()[0] || batch.rows > page_table.dimensions()[0] ||
      batch.rows >= q_starts.dimensions()[0])
    return ffi::Error::InvalidArgument("attention: more rows than the batch has room for");
  std::string wrong = fault(args, batch, kv_dims[0]);
  if (!wrong.empty()) return ffi::Error::InvalidArgument("attention: " + wrong);
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
  for (int64_t t = 0; t < tokens; ++t) {
    int64_t slot = slots.typed_data()[t];
    if (slot < 0 || slot >= dims[0] * page_size)
      return ffi::Error::InvalidArgument("write_kv: slot " + std::to_string(slot) + " is outside the pool");
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
