// `linear` as XLA calls it: x f32 [m, k], w [n, k] f32, bf16 or s8, for s8 also scales f32 [n, ceil(k / kGroup)];
// gives f32 [m, n].
#include "linear_tasks.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace tierax {
namespace {

ffi::Error call(ffi::ThreadPool pool, ffi::BufferR2<ffi::F32> x, ffi::AnyBuffer w, ffi::RemainingArgs scales,
                ffi::Result<ffi::BufferR2<ffi::F32>> y) {
  Linear args{x.typed_data(), w.untyped_data(), nullptr, y->typed_data(), x.dimensions()[0], 0, x.dimensions()[1], {}};
  if (args.k == 0 || w.dimensions().size() != 2 || w.dimensions()[1] != args.k)
    return ffi::Error::InvalidArgument("linear: the weight must be [n, k] for x [m, k], k at least 1");
  args.n = w.dimensions()[0];
  if (y->dimensions()[0] != args.m || y->dimensions()[1] != args.n)
    return ffi::Error::InvalidArgument("linear: the result must be [m, n]");
  switch (w.element_type()) {
    case ffi::F32: args.type = WeightType::kF32; break;
    case ffi::BF16: args.type = WeightType::kBf16; break;
    case ffi::S8: {
      args.type = WeightType::kInt8;
      auto buffer = scales.get<ffi::BufferR2<ffi::F32>>(0);
      if (!buffer.has_value() || buffer->dimensions()[0] != args.n ||
          buffer->dimensions()[1] != (args.k + kGroup - 1) / kGroup)
        return ffi::Error::InvalidArgument("linear: int8 weights need scales f32 [n, ceil(k / group)]");
      args.scales = buffer->typed_data();
      break;
    }
    default: return ffi::Error::InvalidArgument("linear: weights are f32, bf16 or int8");
  }
  if (args.m && args.n) run_linear(kernels(), pool, args);
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
#pragma GCC visibility pop
