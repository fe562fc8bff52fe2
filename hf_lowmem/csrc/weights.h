// How a weight is written in 8 or 4 bits, read, and written again: kernels/weights.py.
//
// A row is what shares a scale: with 4 bits, 32 values. Plain loops, which compilers turn into vectors as long as
// nothing in them branches and no store may change what is read. Of rows of 4 bits they make too little on x86, on
// which weights_x86.h has some of the steps, as isa_neon.cpp has on Arm.
#pragma once

#include "adam_any.h"
#include "common.h"

namespace {

constexpr float kUnit = float(1 / 126.99);  // of the largest magnitude: a code's worth (int8.UNIT)
constexpr float kRoom = 1.0f + 1.0f / 16;   // that a row is given when it has outgrown its scale
constexpr float kNearest = 12582912.0f;     // 1.5 * 2**23: with it added, the last bits are the nearest integer
constexpr uint32_t kInf = 0x7F800000u, kNaN = 0x7FC00000u;
constexpr int kFour = 32;  // values of a row of 4 bits

// -- the types of weights -----------------------------------------------------------------------------------------
struct AsF32 {
  static constexpr bool kHalf = false;
  using Word = float;
  using Bits = uint32_t;
  static HLM_INLINE Bits bits(Word x) { return float_bits(x); }
  static HLM_INLINE float widen(Word x) { return x; }
  static HLM_INLINE float widen_bits(Bits x) { return bits_float(x); }
  static HLM_INLINE Word narrow(float x) { return x; }
};

struct AsBf16 {
  static constexpr bool kHalf = false;
  using Word = uint16_t;
  using Bits = uint16_t;
  static HLM_INLINE Bits bits(Word x) { return x; }
  static HLM_INLINE float widen(Word x) { return from_bf16(x); }
  static HLM_INLINE float widen_bits(Bits x) { return from_bf16(x); }
  // For numbers, and NaNs whose last bits are zero, as those are that decoding meets.
  static HLM_INLINE Word narrow(float x) {
    const uint32_t bits = float_bits(x);
    return uint16_t((bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16);
  }
};

struct AsF16 {
  static constexpr bool kHalf = true;
  using Word = uint16_t;
  using Bits = uint16_t;
  static HLM_INLINE Bits bits(Word x) { return x; }
  static HLM_INLINE float widen(Word x) { return from_f16(x); }
  static HLM_INLINE float widen_bits(Bits x) { return from_f16(x); }
  static HLM_INLINE Word narrow(float x) { return nearest_f16(x); }
};

// -- 8 bits -------------------------------------------------------------------------------------------------------
// The bits of a row's largest magnitude. They are in the order of the magnitudes, those of a NaN the largest.
template <class T>
HLM_INLINE uint32_t largest_bits(const typename T::Word* x, int64_t n) {
  using Bits = typename T::Bits;
  constexpr Bits kMagnitude = Bits(Bits(~Bits(0)) >> 1);
  Bits most = 0;
  for (int64_t i = 0; i < n; i++) {
    const Bits magnitude = Bits(T::bits(x[i]) & kMagnitude);
    most = magnitude > most ? magnitude : most;
  }
  return float_bits(T::widen_bits(most));
}

HLM_INLINE float scale_of(uint32_t largest) {
  const float x = bits_float(largest);
  return largest >= kInf ? bits_float(kNaN) : x < kSmallestScale ? 0.0f : x * kUnit;
}

template <class T>
HLM_INLINE void encode_row(const typename T::Word* __restrict x, int64_t n, int8_t* __restrict codes,
                           float* __restrict scale) {
  *scale = scale_of(largest_bits<T>(x, n));
  if (!(*scale > 0)) {
    memset(codes, 0, size_t(n));
    return;
  }
  const float inverse = 1.0f / *scale;
  for (int64_t i = 0; i < n; i++) codes[i] = int8_t(float_bits(T::widen(x[i]) * inverse + kNearest));
}

template <class T>
HLM_INLINE void decode_row(const int8_t* __restrict codes, float scale, int64_t n, typename T::Word* __restrict x) {
  if (scale != scale) scale = bits_float(kNaN);
  for (int64_t i = 0; i < n; i++) x[i] = T::narrow(float(codes[i]) * scale);
}

// `at`: number of the row's first value within the weight.
HLM_INLINE void recode_row(const float* __restrict x, int64_t at, int64_t n, uint64_t key, int8_t* __restrict codes,
                           float* __restrict scale) {
  const uint32_t bits = largest_bits<AsF32>(x, n);
  const float largest = bits_float(bits);
  if (!(largest <= *scale * kLevels)) *scale = scale_of(bits) * kRoom;
  if (!(*scale > 0)) {
    memset(codes, 0, size_t(n));
    return;
  }
  const float inverse = 1.0f / *scale;
  const uint32_t first = uint32_t(at) * 0x9E3779B9u + uint32_t(key), high = uint32_t(key >> 32);
  for (int64_t i = 0; i < n; i++) {  // codec.Noise's first draw
    uint32_t lane = uint32_t(i) * 0x9E3779B9u + first;
    lane = (lane ^ (lane >> 16)) * 0x85EBCA6Bu;
    lane = (lane ^ (lane >> 13)) * 0xC2B2AE35u;
    lane = lane ^ (lane >> 16) ^ high;
    const float dither = (float(int32_t(lane >> 18)) + 0.5f) * (1.0f / (1 << 14)) - 0.5f;
    codes[i] = int8_t(float_bits(x[i] * inverse + dither + kNearest));
  }
}

// -- 4 bits -------------------------------------------------------------------------------------------------------
// The steps that an instruction set may have in words of its own.
struct PlainFours {
  // With its sign behind its magnitude a value's bits are in the order in which it decides the scale: the largest in
  // magnitude, of two alike the negative one. The last of a row's in this order.
  template <class T>
  static HLM_INLINE typename T::Bits last(const typename T::Word* x) {
    using Bits = typename T::Bits;
    constexpr int kSign = int(8 * sizeof(Bits)) - 1;
    Bits last = 0;
    for (int i = 0; i < kFour; i++) {
      const Bits bits = T::bits(x[i]), order = Bits(Bits(bits << 1) | Bits(bits >> kSign));
      last = order > last ? order : last;
    }
    return last;
  }

  template <class T>
  static HLM_INLINE void encode(const typename T::Word* __restrict x, float inverse, uint8_t* __restrict codes) {
    uint32_t nibbles[kFour];
    for (int i = 0; i < kFour; i++) {
      const float units = T::widen(x[i]) * inverse;  // no less than -8.04
      nibbles[i] = float_bits((units < 7.0f ? units : 7.0f) + (kNearest + 8.0f)) & 15;
    }
    for (int i = 0; i < kFour / 2; i++) codes[i] = uint8_t(nibbles[i] | nibbles[kFour / 2 + i] << 4);
  }

  // Of 16 values those that a row's codes are the numbers of.
  template <class Word>
  static HLM_INLINE void look_up(const Word* __restrict values, const uint8_t* __restrict codes, Word* __restrict x) {
    for (int i = 0; i < kFour / 2; i++) {
      x[i] = values[codes[i] & 15];
      x[kFour / 2 + i] = values[codes[i] >> 4];
    }
  }
};

// What is largest in magnitude becomes the code -8, or one close to it. Some rows at a time, so that their inverses are
// divisions of vectors.
template <class T, class Fours>
void encode_fours(const typename T::Word* x, int64_t rows, uint8_t* codes, uint16_t* scales) {
  using Bits = typename T::Bits;
  constexpr int kTogether = 16;
  for (int64_t at = 0; at < rows; at += kTogether) {
    const int count = rows - at < kTogether ? int(rows - at) : kTogether;
    Bits last[kTogether] = {};
    uint16_t found[kTogether];
    float inverses[kTogether];
    for (int i = 0; i < count; i++) last[i] = Fours::template last<T>(x + (at + i) * kFour);
    for (int i = 0; i < kTogether; i++) {
      const float largest = T::widen_bits(Bits(last[i] >> 1));
      const uint16_t nearest = nearest_bf16(largest * 0.125f), sign = uint16_t((last[i] & 1) << 15 ^ 0x8000);
      const bool usable = from_bf16(nearest) >= kSmallestScale, finite = float_bits(largest) < kInf;
      found[i] = finite ? usable ? uint16_t(nearest | sign) : uint16_t(0) : uint16_t(kNaN >> 16);
      inverses[i] = usable && finite ? 1.0f / from_bf16(found[i]) : 0.0f;
    }
    memcpy(scales + at, found, size_t(count) * sizeof(uint16_t));
    for (int i = 0; i < count; i++) {
      uint8_t* const to = codes + (at + i) * (kFour / 2);
      if (found[i] == kNaN >> 16) {
        memset(to, 0x88, kFour / 2);
      } else {
        Fours::template encode<T>(x + (at + i) * kFour, inverses[i], to);
      }
    }
  }
}

// A code stands for one of 16 values, which are found once a row. Some rows at a time: what has just been stored value
// by value cannot be loaded as a vector yet.
template <class T, class Fours>
void decode_fours(const uint8_t* codes, const uint16_t* scales, int64_t rows, typename T::Word* __restrict x) {
  constexpr int kTogether = 8;
  for (int64_t at = 0; at < rows; at += kTogether) {
    const int count = rows - at < kTogether ? int(rows - at) : kTogether;
    typename T::Word values[kTogether][16];
    for (int i = 0; i < count; i++) {
      const float unit = from_bf16(scales[at + i]);
      for (int code = 0; code < 16; code++) values[i][code] = T::narrow(float(code - 8) * unit);
    }
    for (int i = 0; i < count; i++) Fours::look_up(values[i], codes + (at + i) * (kFour / 2), x + (at + i) * kFour);
  }
}

// -- rows of a weight ---------------------------------------------------------------------------------------------
template <class T, class Fours>
void weight_rows_of(int action, const hlm_weight& w, int64_t first, int64_t last) {
  const int64_t n = w.columns;
  auto* const x = static_cast<typename T::Word*>(w.values) + first * n;
  if (w.bits == 4) {
    uint8_t* const codes = static_cast<uint8_t*>(w.codes) + first * (kFour / 2);
    uint16_t* const scale = static_cast<uint16_t*>(w.scale) + first;
    if (action == HLM_ENCODE) {
      encode_fours<T, Fours>(x, last - first, codes, scale);
    } else {
      decode_fours<T, Fours>(codes, scale, last - first, x);
    }
    return;
  }
  int8_t* const codes = static_cast<int8_t*>(w.codes) + first * n;
  float* const scale = static_cast<float*>(w.scale) + first;
  for (int64_t i = 0; i < last - first; i++) {
    if (action == HLM_ENCODE) {
      encode_row<T>(x + i * n, n, codes + i * n, scale + i);
    } else {
      decode_row<T>(codes + i * n, scale[i], n, x + i * n);
    }
  }
}

template <class Fours>
void weight_rows(int action, const hlm_weight& w, int64_t first, int64_t last) {
  if (action == HLM_RECODE) {
    for (int64_t row = first; row < last; row++) {
      const int64_t at = row * w.columns;
      recode_row(static_cast<const float*>(w.values) + at, at, w.columns, w.key, static_cast<int8_t*>(w.codes) + at,
                 static_cast<float*>(w.scale) + row);
    }
  } else if (w.dtype == HLM_F32) {
    weight_rows_of<AsF32, Fours>(action, w, first, last);
  } else if (w.dtype == HLM_BF16) {
    weight_rows_of<AsBf16, Fours>(action, w, first, last);
  } else {
    weight_rows_of<AsF16, Fours>(action, w, first, last);
  }
}

}  // namespace
