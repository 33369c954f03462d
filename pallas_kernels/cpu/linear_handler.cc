// `linear` as XLA calls it: x f32 [m, k], w [n, k] f32, bf16 or s8, for s8 also scales f32 [n, ceil(k / kGroup)];
// gives f32 [m, n]. And the same for a matrix per group of rows: sizes s32 [e], w [e, n, k], scales [e, n, ...].
#include <cstring>

#include "handlers.h"
#include "linear_tasks.h"

namespace tierax {
namespace {

using Matrix = ffi::BufferR2<ffi::F32>;

// Type, n and scales of `matrices` weights of one shape, which lie one behind the other; `args` has m and k.
ffi::Error read_weights(int64_t matrices, ffi::AnyBuffer w, ffi::RemainingArgs scales, Linear& args) {
  const auto shape = w.dimensions();
  if (args.k == 0 || shape.size() < 2 || shape.back() != args.k)
    return ffi::Error::InvalidArgument("linear: weights must be [..., n, k] for x [m, k], k at least 1");
  args.n = shape[shape.size() - 2];
  args.w = w.untyped_data();
  if (ffi::Error error = read_type(w, args.type); error.failure()) return error;
  if (args.type != WeightType::kInt8) return ffi::Error::Success();
  return read_scales(scales.get<ffi::AnyBuffer>(0), matrices * args.n, args.k, args.scales);
}

ffi::Error call(ffi::ThreadPool pool, Matrix x, ffi::AnyBuffer w, ffi::RemainingArgs scales, ffi::Result<Matrix> y) {
  Linear args{x.typed_data(), nullptr, nullptr, y->typed_data(), x.dimensions()[0], 0, x.dimensions()[1], {}};
  if (w.dimensions().size() != 2) return ffi::Error::InvalidArgument("linear: the weight must be [n, k]");
  if (ffi::Error error = read_weights(1, w, scales, args); error.failure()) return error;
  if (y->dimensions()[0] != args.m || y->dimensions()[1] != args.n)
    return ffi::Error::InvalidArgument("linear: the result must be [m, n]");
  if (args.m && args.n) run_linear(kernels(), pool, args);
  return ffi::Error::Success();
}

ffi::Error call_grouped(ffi::ThreadPool pool, Matrix x, ffi::BufferR1<ffi::S32> sizes, ffi::AnyBuffer w,
                        ffi::RemainingArgs scales, ffi::Result<Matrix> y) {
  const int64_t experts = sizes.dimensions()[0], rows = x.dimensions()[0];
  Linear args{x.typed_data(), nullptr, nullptr, y->typed_data(), 0, 0, x.dimensions()[1], {}};
  if (w.dimensions().size() != 3 || w.dimensions()[0] != experts)
    return ffi::Error::InvalidArgument("grouped linear: weights must be [e, n, k] for sizes [e]");
  if (ffi::Error error = read_weights(experts, w, scales, args); error.failure()) return error;
  if (y->dimensions()[0] != rows || y->dimensions()[1] != args.n)
    return ffi::Error::InvalidArgument("grouped linear: the result must be [m, n]");
  const int64_t bytes = args.type == WeightType::kF32 ? 4 : args.type == WeightType::kBf16 ? 2 : 1;
  const int64_t groups = (args.k + kGroup - 1) / kGroup;
  int64_t left = rows;
  for (int64_t e = 0; e < experts; ++e) {
    args.m = sizes.typed_data()[e];
    if (args.m < 0 || args.m > left) return ffi::Error::InvalidArgument("grouped linear: sizes add up to more than m");
    if (args.m && args.n) run_linear(kernels(), pool, args);
    left -= args.m;
    args.x += args.m * args.k;
    args.y += args.m * args.n;
    args.w = static_cast<const char*>(args.w) + args.n * args.k * bytes;
    if (args.scales) args.scales += args.n * groups;
  }
  // Rows of no group.
  std::memset(args.y, 0, sizeof(float) * left * args.n);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace tierax

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(tierax_linear, tierax::call,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::BufferR2<ffi::F32>>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(tierax_grouped_linear, tierax::call_grouped,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::BufferR2<ffi::F32>>()
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::BufferR2<ffi::F32>>());
#pragma GCC visibility pop
