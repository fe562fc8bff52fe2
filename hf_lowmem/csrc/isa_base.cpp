// Portable C++: runs anywhere, and is what the other instruction sets are measured by. No intrinsics; arrays short
// enough for a compiler to vectorise.

#include <float.h>
#include <math.h>

#include "adam_any.h"
#include "weights.h"

static_assert(FLT_EVAL_METHOD == 0, "fp32 arithmetic must be rounded to fp32: build for SSE2 or newer");

namespace {

// a * b + c, rounded once, on machines without such an instruction (codec.fma). The product of two fp32 numbers is
// exact in double; the sum is rounded to odd, so that rounding it to fp32 is the only rounding (Boldo and Melquiond,
// Emulation of FMA and correctly rounded sums, 2008).
HLM_INLINE float fma_once(float a, float b, float c) {
  const double product = double(a) * double(b), addend = c;
  double sum = product + addend;
  const double back = sum - product;
  const double error = (product - (sum - back)) + (addend - back);
  uint64_t bits, error_bits;
  memcpy(&bits, &sum, 8);
  memcpy(&error_bits, &error, 8);
  const uint64_t inexact = (error > 0 ? 1u : 0u) | (error < 0 ? 1u : 0u);  // not where the sum is no number
  const uint64_t rounded_up = ((bits ^ error_bits) >> 63) & inexact;       // away from zero
  bits = (bits - rounded_up) | inexact;
  memcpy(&sum, &bits, 8);
  return float(sum);
}

struct Base {
  static constexpr int kGroup = 64;
  static constexpr bool kInPlace = false;
  static constexpr int kWidth = 16;

  struct F {
    float x[kWidth];
  };
  struct F4 {
    F v[4];
  };
  struct W2 {
    uint16_t x[kGroup];
  };
  struct B {
    uint8_t x[kGroup];
  };
  struct Lanes {
    uint32_t x[16];
  };
  using Draw = Lanes;

  // -- arithmetic
  static HLM_INLINE F set1(float s) {
    return map([=](int) { return s; });
  }
  static HLM_INLINE F mul(F a, F b) {
    return map([&](int i) { return a.x[i] * b.x[i]; });
  }
  static HLM_INLINE F div(F a, F b) {
    return map([&](int i) { return a.x[i] / b.x[i]; });
  }
  static HLM_INLINE F fma(F a, F b, F c) {
    return map([&](int i) { return fma_once(a.x[i], b.x[i], c.x[i]); });
  }
  static HLM_INLINE F sqrt(F a) {
    return map([&](int i) { return ::sqrtf(a.x[i]); });
  }
  static HLM_INLINE F abs(F a) {
    return map([&](int i) { return bits_float(float_bits(a.x[i]) & 0x7FFFFFFFu); });
  }
  static HLM_INLINE F max(F a, F b) {
    return map([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; });
  }
  static HLM_INLINE float largest(F a) {
    float most = a.x[0];
    for (int i = 1; i < kWidth; i++) most = a.x[i] > most ? a.x[i] : most;
    return most;
  }
  static HLM_INLINE void largest(F a, F b, float& most_a, float& most_b) {
    most_a = largest(a);
    most_b = largest(b);
  }

  // -- memory
  static HLM_INLINE F load_unaligned(const float* p) {
    F out;
    memcpy(&out, p, sizeof out);
    return out;
  }
  static HLM_INLINE void store_unaligned(float* p, F a) { memcpy(p, &a, sizeof a); }
  static HLM_INLINE F load(const float* p) { return load_unaligned(p); }
  static HLM_INLINE void store(float* p, F a) { store_unaligned(p, a); }
  static HLM_INLINE F4 load_floats(const float* p) {
    F4 out;
    memcpy(&out, p, sizeof out);
    return out;
  }
  static HLM_INLINE void store_floats(float* p, F4 a) { memcpy(p, &a, sizeof a); }
  static HLM_INLINE B load_bytes(const void* p) {
    B out;
    memcpy(&out, p, sizeof out);
    return out;
  }
  static HLM_INLINE void store_bytes(void* p, B a) { memcpy(p, &a, sizeof a); }
  static HLM_INLINE B load_codes(const void* p) { return load_bytes(p); }
  static HLM_INLINE void store_codes(void* p, B a) { store_bytes(p, a); }

  // -- codes
  static HLM_INLINE B merge_nibbles(B low, B high) {
    B out;
    for (int i = 0; i < kGroup; i++) out.x[place(i)] = uint8_t((low.x[i] & 15) | (high.x[i] << 4));
    return out;
  }
  static HLM_INLINE B flip(B a, uint8_t mask) {
    for (int i = 0; i < kGroup; i++) a.x[i] ^= mask;
    return a;
  }
  template <int kNibble>
  static HLM_INLINE F4 lookup(const NibbleTable& table, B a) {
    return each([&](int i) {
      const int code = (a.x[place(i)] >> (4 * kNibble)) & 15;
      return bits_float(uint32_t(table.high[code]) << 24 | uint32_t(table.low[code]) << 16);
    });
  }
  static HLM_INLINE F4 decode_m8(B a) {
    return each([&](int i) { return float(int(a.x[i]) - 128); });
  }
  static HLM_INLINE F4 decode_root8(B a) {
    return each([&](int i) { return bits_float((uint32_t(a.x[i]) << 18) + 0x40000000u); });
  }
  static HLM_INLINE B encode_m8(const F4& m, const W2& noise) {
    // Adding 1.5 * 2**23 leaves the integer nearest to a value under 2**22 (ties to even) in the last bits of the sum.
    constexpr float kMagic = 12582912.0f;
    B out;
    for (int i = 0; i < kGroup; i++) {
      const uint32_t fixed = float_bits(m.v[i / kWidth].x[i % kWidth] + kMagic) - float_bits(kMagic);
      out.x[i] = uint8_t((fixed + noise.x[i]) >> 8);
    }
    return out;
  }
  // Exponent and first mantissa bits, counted from `base`.
  template <int kMantissa>
  static HLM_INLINE B encode_float(const F4& a, uint32_t base, const W2& noise) {
    constexpr int kShift = 15 - kMantissa;
    const int32_t offset = int32_t(base);
    B out;
    for (int i = 0; i < kGroup; i++) {
      const int32_t above = int32_t(float_bits(a.v[i / kWidth].x[i % kWidth])) - offset;
      const uint32_t fixed = above < 0 ? 0 : least(uint32_t(above) >> kShift, 0xFFFF);
      out.x[i] = uint8_t(least(fixed + noise.x[i], 0xFFFF) >> 8);
    }
    return out;
  }
  // Exponents, counted from `base`; negative where `sign` is.
  static HLM_INLINE B encode_signed(const F4& a, const F4& sign, uint32_t base, const W2& noise) {
    B out = encode_float<0>(a, base, noise);
    for (int i = 0; i < kGroup; i++) {
      const uint8_t negative = uint8_t(0u - (float_bits(sign.v[i / kWidth].x[i % kWidth]) >> 31));
      out.x[i] = uint8_t((out.x[i] ^ negative) - negative);
    }
    return out;
  }

  // -- random bits: codec.Noise
  static HLM_INLINE Lanes seed(uint64_t key, int64_t block) {
    Lanes out;
    for (uint32_t i = 0; i < 16; i++) {
      uint32_t x = (uint32_t(block) * 16 + i) * 0x9E3779B9u + uint32_t(key);
      x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
      x = (x ^ (x >> 13)) * 0xC2B2AE35u;
      out.x[i] = x ^ (x >> 16) ^ uint32_t(key >> 32);
    }
    return out;
  }
  static HLM_INLINE Draw draw(Lanes& lanes) {
    const Draw out = lanes;
    for (uint32_t& x : lanes.x) {
      x ^= x << 13;
      x ^= x >> 17;
      x ^= x << 5;
    }
    return out;
  }
  static HLM_INLINE void store_draw(uint16_t* p, Draw draw) {
    for (int i = 0; i < 16; i++) {
      p[2 * i] = uint16_t(draw.x[i]);
      p[2 * i + 1] = uint16_t(draw.x[i] >> 16);
    }
  }
  // 32 values take the lower bytes of the draw's words, 32 the upper ones: m's noise, and exchanged v's.
  template <int kSub>
  static HLM_INLINE W2 noise_bytes(Draw draw) {
    uint16_t words[kGroup / 2];
    store_draw(words, draw);
    W2 out;
    for (int i = 0; i < kGroup; i++) out.x[i] = uint16_t(words[i % 32] >> (i / 32 * 8) & 255);
    return out;
  }
  static HLM_INLINE W2 exchange(const W2& a) {
    W2 out;
    for (int i = 0; i < kGroup; i++) out.x[i] = a.x[i ^ 32];
    return out;
  }

 private:
  // The byte of a half's 64 that holds the 4-bit code of value i.
  static HLM_INLINE int place(int i) { return i % 32 / 8 * 16 + i / 32 * 8 + i % 8; }
  template <class Function>
  static HLM_INLINE F map(Function value) {
    F out;
    for (int i = 0; i < kWidth; i++) out.x[i] = value(i);
    return out;
  }
  template <class Function>
  static HLM_INLINE F4 each(Function value) {
    F4 out;
    for (int i = 0; i < kGroup; i++) out.v[i / kWidth].x[i % kWidth] = value(i);
    return out;
  }
};

void triad(float* a, const float* b, const float* c, float s, int64_t n) {
  for (int64_t i = 0; i < n; i++) a[i] = b[i] + s * c[i];
}

}  // namespace

const hlm::Kernels hlm::kBase = {step_blocks<Base>, any_over<Base>, weight_rows<PlainFours>, triad};
