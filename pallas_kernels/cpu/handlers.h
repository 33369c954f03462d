// How XLA's arguments become those of the kernels. Each function gives an error, and what it read by its last argument.
#pragma once

#include <string>

#include "attention_tasks.h"
#include "linear.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tierax {

// The pool of attention whose heads and head_dim are there already: see pages.py.
inline ffi::Error read_pool(ffi::AnyBuffer pool, Attention& args) {
  switch (pool.element_type()) {
    case ffi::F32: args.type = KvType::kF32; break;
    case ffi::BF16: args.type = KvType::kBf16; break;
    case ffi::U8: args.type = KvType::kE4m3; break;
    default: return ffi::Error::InvalidArgument("attention: a pool is f32, bf16 or u8");
  }
  const auto dims = pool.dimensions();
  const int64_t width = ffi::ByteWidth(pool.element_type()), scales = args.type == KvType::kE4m3 ? 4 : 0;
  args.pool = static_cast<const char*>(pool.untyped_data());
  args.layers = dims[1];
  args.page_size = dims[2];
  args.kv_heads = dims.size() == 5 ? dims[3] : 1;
  args.row_bytes = dims.back() * width;
  if (args.row_bytes != 2 * args.head_dim * width + scales || !args.kv_heads || args.heads % args.kv_heads)
    return ffi::Error::InvalidArgument("attention: the heads of q and those of the pool do not match");
  return ffi::Error::Success();
}

// See batch.py; tokens: how many there is room for.
inline ffi::Error read_batch(const Attention& args, int64_t pages, int64_t tokens, ffi::BufferR1<ffi::S32> q_starts,
                             ffi::BufferR1<ffi::S32> kv_lens, ffi::BufferR2<ffi::S32> page_table,
                             ffi::BufferR0<ffi::S32> num_rows, Batch& batch) {
  batch = Batch{q_starts.typed_data(), kv_lens.typed_data(),       page_table.typed_data(),
                *num_rows.typed_data(), page_table.dimensions()[1], tokens};
  if (batch.rows < 0 || batch.rows > kv_lens.dimensions()[0] || batch.rows > page_table.dimensions()[0] ||
      batch.rows >= q_starts.dimensions()[0])
    return ffi::Error::InvalidArgument("attention: more rows than the batch has room for");
  std::string wrong = fault(args, batch, pages);
  return wrong.empty() ? ffi::Error::Success() : ffi::Error::InvalidArgument("attention: " + wrong);
}

// Whether all of these slots are in a pool of so many.
inline ffi::Error check_slots(const int32_t* slots, int64_t tokens, int64_t in_pool) {
  for (int64_t t = 0; t < tokens; ++t)
    if (slots[t] < 0 || slots[t] >= in_pool)
      return ffi::Error::InvalidArgument("write_kv: slot " + std::to_string(slots[t]) + " is outside the pool");
  return ffi::Error::Success();
}

// The type of weights, which are f32, bf16 or int8.
inline ffi::Error read_type(ffi::AnyBuffer w, WeightType& type) {
  switch (w.element_type()) {
    case ffi::F32: type = WeightType::kF32; return ffi::Error::Success();
    case ffi::BF16: type = WeightType::kBf16; return ffi::Error::Success();
    case ffi::S8: type = WeightType::kInt8; return ffi::Error::Success();
    default: return ffi::Error::InvalidArgument("linear: weights are f32, bf16 or int8");
  }
}

// The scales of int8 weights that have so many rows [k] in all.
inline ffi::Error read_scales(ffi::ErrorOr<ffi::AnyBuffer> scales, int64_t rows, int64_t k, const float*& data) {
  const int64_t groups = (k + kGroup - 1) / kGroup;
  if (!scales.has_value() || scales->element_type() != ffi::F32 ||
      static_cast<int64_t>(scales->element_count()) != rows * groups)
    return ffi::Error::InvalidArgument("linear: int8 weights need scales f32 [..., n, ceil(k / group)]");
  data = scales->typed_data<float>();
  return ffi::Error::Success();
}

}  // namespace tierax
