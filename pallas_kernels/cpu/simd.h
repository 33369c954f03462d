// The vector vocabulary of the kernels for one instruction set, in a namespace of its own. The compiler's flags choose it:
// one source is compiled several times, and its functions never call those of another set.
#pragma once

#include "isa.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define TIERAX_ISA avx512
#define TIERAX_WIDTH 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define TIERAX_ISA avx2
#define TIERAX_WIDTH 8
#elif defined(__aarch64__)
#include <arm_neon.h>
#define TIERAX_ISA neon
#define TIERAX_WIDTH 4
#else
#define TIERAX_ISA plain
#define TIERAX_WIDTH 4
#endif

namespace tierax::TIERAX_ISA {

constexpr int kWidth = TIERAX_WIDTH;
// Vector registers (SSE2 has 16, but plain code is judged by nobody).
constexpr int kRegisters = TIERAX_WIDTH == 8 || sizeof(void*) == 4 ? 16 : 32;

typedef float Vec __attribute__((vector_size(4 * kWidth)));
typedef int32_t IVec __attribute__((vector_size(4 * kWidth)));
typedef float Quad __attribute__((vector_size(16)));

template <typename To, typename From>
TIERAX_INLINE To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// (x - 0 is x whatever its sign, which compilers know: no subtraction is left.)
TIERAX_INLINE Vec splat(float value) { return value - Vec{}; }

// a * b + c, rounded once where the instruction set can; never left to the compiler's choice, so that every path
// through a kernel rounds alike.
TIERAX_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if TIERAX_WIDTH == 16
  return Vec(_mm512_fmadd_ps(a, b, c));
#elif TIERAX_WIDTH == 8
  return Vec(_mm256_fmadd_ps(a, b, c));
#elif defined(__aarch64__)
  return vfmaq_f32(c, a, b);
#else
  return a * b + c;
#endif
}

TIERAX_INLINE Vec max(Vec a, Vec b) {
#if TIERAX_WIDTH == 16
  return Vec(_mm512_max_ps(a, b));
#elif TIERAX_WIDTH == 8
  return Vec(_mm256_max_ps(a, b));
#else
  return a > b ? a : b;
#endif
}

// ---- memory: f32 of kWidth stored elements, of any alignment

TIERAX_INLINE Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

TIERAX_INLINE void store(float* to, Vec v) { std::memcpy(to, &v, sizeof(v)); }

// kWidth integers as i32. Compilers make halves of a conversion that these sets do at once: hence the intrinsics.
template <typename Narrow>
TIERAX_INLINE IVec widen(const Narrow* from) {
  typedef Narrow Lanes __attribute__((vector_size(sizeof(Narrow) * kWidth)));
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
#if TIERAX_WIDTH == 16
  if constexpr (sizeof(Narrow) == 2) return IVec(_mm512_cvtepu16_epi32(__m256i(lanes)));
  else if constexpr (Narrow(-1) < 0) return IVec(_mm512_cvtepi8_epi32(__m128i(lanes)));
  else return IVec(_mm512_cvtepu8_epi32(__m128i(lanes)));
#elif TIERAX_WIDTH == 8
  if constexpr (sizeof(Narrow) == 2) return IVec(_mm256_cvtepu16_epi32(__m128i(lanes)));
  else if constexpr (Narrow(-1) < 0) return IVec(_mm256_cvtepi8_epi32(_mm_loadu_si64(&lanes)));
  else return IVec(_mm256_cvtepu8_epi32(_mm_loadu_si64(&lanes)));
#else
  return __builtin_convertvector(lanes, IVec);
#endif
}

TIERAX_INLINE Vec load(const int8_t* from) { return __builtin_convertvector(widen(from), Vec); }

TIERAX_INLINE Vec load(const bf16* from) { return bits_of<Vec>(widen(&from->bits) << 16); }

// To the bit what `quant.decode` gives, with denormals flushed to zero or not.
TIERAX_INLINE Vec load(const e4m3* from) {
#if TIERAX_WIDTH >= 8
  // Shifted, a code is a number of half precision whose exponent has another bias.
  typedef int16_t Halves __attribute__((vector_size(2 * kWidth)));
  typedef int8_t Codes __attribute__((vector_size(kWidth)));
  Codes codes;
  std::memcpy(&codes, from, sizeof(codes));
#if TIERAX_WIDTH == 16
  Halves halves = (Halves(_mm256_cvtepi8_epi16(__m128i(codes))) << 7) & int16_t(0xBFFF);
  return Vec(_mm512_cvtph_ps(__m256i(halves))) * 256;
#else
  Halves halves = (Halves(_mm_cvtepi8_epi16(_mm_cvtsi64_si128(bits_of<long long>(codes)))) << 7) & int16_t(0xBFFF);
  return Vec(_mm256_cvtph_ps(__m128i(halves))) * 256;
#endif
#else
  IVec code = widen(&from->bits);
  IVec magnitude = code & 0x7F;
  Vec normal = bits_of<Vec>((magnitude + ((127 - 7) << 3)) << 20);
  Vec small = __builtin_convertvector(magnitude, Vec) * 0x1p-9f;
  IVec chosen = magnitude < 8 ? bits_of<IVec>(small) : bits_of<IVec>(normal);
  return bits_of<Vec>(chosen | ((code & 0x80) << 24));
#endif
}

// The first `count` < kWidth elements, and zeros behind; nothing else is read.
template <typename T>
TIERAX_INLINE Vec load(const T* from, int64_t count) {
  T lanes[kWidth] = {};
  std::memcpy(lanes, from, sizeof(T) * count);
  return load(lanes);
}

TIERAX_INLINE void store(float* to, Vec v, int64_t count) { std::memcpy(to, &v, sizeof(float) * count); }

// ---- across lanes

// The sums of four vectors. The order of additions is the same for each, whatever stands beside it.
TIERAX_INLINE Quad sums(Vec a, Vec b, Vec c, Vec d) {
#if TIERAX_WIDTH == 16
  auto fold = [](Vec v) {
    typedef float Half __attribute__((vector_size(32)));
    return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
           Half(__builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
  };
  auto a8 = fold(a), b8 = fold(b), c8 = fold(c), d8 = fold(d);
#else
  auto a8 = a, b8 = b, c8 = c, d8 = d;
#endif
#if TIERAX_WIDTH >= 8
  auto ab = __builtin_shufflevector(a8, b8, 0, 8, 1, 9, 4, 12, 5, 13) +
            __builtin_shufflevector(a8, b8, 2, 10, 3, 11, 6, 14, 7, 15);
  auto cd = __builtin_shufflevector(c8, d8, 0, 8, 1, 9, 4, 12, 5, 13) +
            __builtin_shufflevector(c8, d8, 2, 10, 3, 11, 6, 14, 7, 15);
  auto abcd = __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) +
              __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
  return __builtin_shufflevector(abcd, abcd, 0, 1, 2, 3) + __builtin_shufflevector(abcd, abcd, 4, 5, 6, 7);
#else
  auto ab = __builtin_shufflevector(a8, b8, 0, 4, 1, 5) + __builtin_shufflevector(a8, b8, 2, 6, 3, 7);
  auto cd = __builtin_shufflevector(c8, d8, 0, 4, 1, 5) + __builtin_shufflevector(c8, d8, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
#endif
}

TIERAX_INLINE float sum(Vec v) { return sums(v, v, v, v)[0]; }

TIERAX_INLINE float largest(Vec v) {
  float lanes[kWidth];
  store(lanes, v);
  for (int half = kWidth / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  return lanes[0];
}

// ---- functions

// e ** x with an error of about one unit in the last place for x in [-87, 88]; 0 below, saturating above, NaN for NaN. A power of
// two is split off by rounding x / ln 2 (Cody and Waite, 1980); the rest is a minimax polynomial on [-ln 2 / 2, ln 2 / 2].
TIERAX_INLINE Vec exp(Vec x) {
  const Vec magic = splat(0x1.8p23f);
  const IVec vanishes = x < -87.0f;
  // (Of two operands of which one is no number, max is the second one.)
  x = -max(splat(-88.0f), -x);
  x = max(splat(-87.0f), x);
  Vec shifted = fma(x, splat(0x1.715476p+0f), magic);
  Vec n = shifted - magic;
  Vec r = fma(n, splat(-0x1.62e400p-1f), x);
  r = fma(n, splat(-0x1.7f7d1cp-20f), r);
  Vec p = splat(1.0f / 5040);
  p = fma(p, r, splat(1.0f / 720));
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  IVec power = bits_of<IVec>(shifted) << 23;
  IVec result = bits_of<IVec>(p) + power;
  return bits_of<Vec>(result & ~vanishes);
}

}  // namespace tierax::TIERAX_ISA
