// NEON of 64-bit Arm: groups of 16 values, a half after the other throughout.

#include <arm_neon.h>

#include "adam_any.h"
#include "common.h"
#include "weights.h"

namespace {

struct Neon {
  static constexpr int kGroup = 16;
  static constexpr bool kInPlace = true;
  static constexpr int kPrefetchBlocks = 0;  // x86.h; not measured here
  using F = float32x4_t;
  using B = uint8x16_t;
  struct F4 {
    F v[4];
  };
  struct W2 {
    uint16x8_t v[2];
  };
  struct Lanes {
    uint32x4_t v[4];
  };
  using Draw = Lanes;

  // -- arithmetic
  static HLM_INLINE F set1(float x) { return vdupq_n_f32(x); }
  static HLM_INLINE F mul(F a, F b) { return vmulq_f32(a, b); }
  static HLM_INLINE F div(F a, F b) { return vdivq_f32(a, b); }
  static HLM_INLINE F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static HLM_INLINE F sqrt(F a) { return vsqrtq_f32(a); }
  static HLM_INLINE F abs(F a) { return vabsq_f32(a); }
  static HLM_INLINE F max(F a, F b) { return vmaxq_f32(a, b); }
  static HLM_INLINE void largest(F a, F b, float& most_a, float& most_b) {
    most_a = vmaxvq_f32(a);
    most_b = vmaxvq_f32(b);
  }

  // -- memory
  static HLM_INLINE F load(const float* p) { return vld1q_f32(p); }
  static HLM_INLINE F load_unaligned(const float* p) { return vreinterpretq_f32_u8(load_codes(p)); }
  static HLM_INLINE void store(float* p, F a) { vst1q_f32(p, a); }
  static HLM_INLINE void store_unaligned(float* p, F a) { store_codes(p, vreinterpretq_u8_f32(a)); }
  static HLM_INLINE F4 load_floats(const float* p) {
    return {{load_unaligned(p), load_unaligned(p + 4), load_unaligned(p + 32), load_unaligned(p + 36)}};
  }
  static HLM_INLINE void store_floats(float* p, F4 a) {
    for (int k = 0; k < 4; k++) store_unaligned(p + k / 2 * 32 + k % 2 * 4, a.v[k]);
  }
  static HLM_INLINE W2 load_words(const uint16_t* p) {
    return {{vreinterpretq_u16_u8(load_codes(p)), vreinterpretq_u16_u8(load_codes(p + 32))}};
  }
  static HLM_INLINE void store_words(uint16_t* p, W2 a) {
    store_codes(p, vreinterpretq_u8_u16(a.v[0]));
    store_codes(p + 32, vreinterpretq_u8_u16(a.v[1]));
  }
  static HLM_INLINE B load_codes(const void* p) { return vld1q_u8(static_cast<const uint8_t*>(p)); }
  static HLM_INLINE void store_codes(void* p, B a) { vst1q_u8(static_cast<uint8_t*>(p), a); }
  static HLM_INLINE B load_bytes(const void* p) {
    const uint8_t* const from = static_cast<const uint8_t*>(p);
    return vcombine_u8(vld1_u8(from), vld1_u8(from + 32));
  }
  static HLM_INLINE void store_bytes(void* p, B a) {
    uint8_t* const to = static_cast<uint8_t*>(p);
    vst1_u8(to, vget_low_u8(a));
    vst1_u8(to + 32, vget_high_u8(a));
  }

  // -- weights and gradients
  static HLM_INLINE F4 widen_bf16(W2 a) { return floats(vdupq_n_u16(0), vdupq_n_u16(0), a.v[0], a.v[1]); }

  // (word << 16) + (extension << 8): the sum's borrow is taken from the words, 16 bits at a time.
  static HLM_INLINE F4 join_bf16(W2 a, B extension) {
    uint16x8_t low[2] = {vshll_n_u8(vget_low_u8(extension), 8), vshll_high_n_u8(extension, 8)};
    for (int i = 0; i < 2; i++) {
      const uint16x8_t nonzero = vtstq_u16(a.v[i], vdupq_n_u16(0x7FFF));
      low[i] = vandq_u16(low[i], nonzero);  // a zero, of either sign, has no extension
      const int16x8_t borrow = vshrq_n_s16(vreinterpretq_s16_u16(low[i]), 15);
      a.v[i] = vaddq_u16(a.v[i], vreinterpretq_u16_s16(borrow));
    }
    return floats(low[0], low[1], a.v[0], a.v[1]);
  }

  // With the extension's noise and the weight's rounding (extension_noise holds both) added at once the extension's
  // byte comes out with its sign bit flipped.
  static HLM_INLINE W2 split_bf16(F4 a, W2 noise, B& extension) {
    uint16x8_t y[4];
    add_words(a, noise, y);
    const uint8x16_t low0 = vreinterpretq_u8_u16(vuzp1q_u16(y[0], y[1]));
    const uint8x16_t low1 = vreinterpretq_u8_u16(vuzp1q_u16(y[2], y[3]));
    extension = flip(vuzp2q_u8(low0, low1), 0x80);
    return {{vuzp2q_u16(y[0], y[1]), vuzp2q_u16(y[2], y[3])}};
  }

  static HLM_INLINE W2 round_bf16(F4 a, W2 noise) {
    uint16x8_t y[4];
    add_words(a, noise, y);
    return {{vuzp2q_u16(y[0], y[1]), vuzp2q_u16(y[2], y[3])}};
  }

  // Whether any of kCount values of kBytes each has magnitude bits over the limit.
  template <int kBytes, int kCount>
  static HLM_INLINE bool any_over(const uint8_t* p, uint32_t limit) {
    if constexpr (kBytes == 2) {
      uint16x8_t most = vdupq_n_u16(0);
      for (int i = 0; i < kCount; i += 8) {
        const uint16x8_t x = vreinterpretq_u16_u8(load_codes(p + 2 * i));
        most = vmaxq_u16(most, vandq_u16(x, vdupq_n_u16(0x7FFF)));
      }
      return vmaxvq_u16(most) > limit;
    } else {
      uint32x4_t most = vdupq_n_u32(0);
      for (int i = 0; i < kCount; i += 4) {
        const uint32x4_t x = vreinterpretq_u32_u8(load_codes(p + 4 * i));
        most = vmaxq_u32(most, vandq_u32(x, vdupq_n_u32(0x7FFFFFFF)));
      }
      return vmaxvq_u32(most) > limit;
    }
  }

  // -- codes
  static HLM_INLINE B merge_nibbles(B low, B high) { return vsliq_n_u8(low, high, 4); }
  static HLM_INLINE B flip(B a, uint8_t mask) { return veorq_u8(a, vdupq_n_u8(mask)); }

  template <int kNibble>
  static HLM_INLINE F4 lookup(const NibbleTable& table, B a) {
    const B codes = kNibble ? vshrq_n_u8(a, 4) : vandq_u8(a, vdupq_n_u8(15));
    const B high = vqtbl1q_u8(vld1q_u8(table.high), codes), low = vqtbl1q_u8(vld1q_u8(table.low), codes);
    return floats(vdupq_n_u16(0), vdupq_n_u16(0), vreinterpretq_u16_u8(vzip1q_u8(low, high)),
                  vreinterpretq_u16_u8(vzip2q_u8(low, high)));
  }

  // Under the exponent of 2**23 a code is the last byte of 2**23 + code.
  static HLM_INLINE F4 decode_m8(B a) {
    const uint16x8_t exponent = vdupq_n_u16(0x4B00);
    F4 x = floats(vmovl_u8(vget_low_u8(a)), vmovl_high_u8(a), exponent, exponent);
    for (int k = 0; k < 4; k++) x.v[k] = vsubq_f32(x.v[k], vdupq_n_f32(8388608.0f + 128.0f));
    return x;
  }
  static HLM_INLINE F4 decode_root8(B a) {
    const uint16x8_t two = vdupq_n_u16(0x4000);
    return floats(vdupq_n_u16(0), vdupq_n_u16(0), vaddq_u16(vshll_n_u8(vget_low_u8(a), 2), two),
                  vaddq_u16(vshll_high_n_u8(a, 2), two));
  }

  static HLM_INLINE B encode_m8(F4 m, W2 noise) {
    int32x4_t x[4];
    for (int k = 0; k < 4; k++) x[k] = vcvtnq_s32_f32(m.v[k]);
    const uint16x8_t a = vreinterpretq_u16_s16(vqmovn_high_s32(vqmovn_s32(x[0]), x[1]));
    const uint16x8_t b = vreinterpretq_u16_s16(vqmovn_high_s32(vqmovn_s32(x[2]), x[3]));
    return high_bytes(vaddq_u16(a, noise.v[0]), vaddq_u16(b, noise.v[1]));
  }
  // Exponent and first mantissa bits, counted from `base`.
  template <int kMantissa>
  static HLM_INLINE B encode_float(F4 a, uint32_t base, W2 noise) {
    constexpr int kShift = 15 - kMantissa;
    const int32x4_t offset = vdupq_n_s32(int32_t(base));
    int32x4_t x[4];
    for (int k = 0; k < 4; k++) x[k] = vshrq_n_s32(vsubq_s32(vreinterpretq_s32_f32(a.v[k]), offset), kShift);
    const uint16x8_t low = vqmovun_high_s32(vqmovun_s32(x[0]), x[1]), high = vqmovun_high_s32(vqmovun_s32(x[2]), x[3]);
    return high_bytes(vqaddq_u16(low, noise.v[0]), vqaddq_u16(high, noise.v[1]));
  }
  // Exponents, counted from `base`; negative where `sign` is.
  static HLM_INLINE B encode_signed(F4 a, F4 sign, uint32_t base, W2 noise) {
    uint16x8_t upper[2];
    for (int i = 0; i < 2; i++)
      upper[i] = vuzp2q_u16(vreinterpretq_u16_f32(sign.v[2 * i]), vreinterpretq_u16_f32(sign.v[2 * i + 1]));
    const int8x16_t negative = vshrq_n_s8(vreinterpretq_s8_u8(high_bytes(upper[0], upper[1])), 7);
    const int8x16_t codes = vreinterpretq_s8_u8(encode_float<0>(a, base, noise));
    return vreinterpretq_u8_s8(vsubq_s8(veorq_s8(codes, negative), negative));
  }

  // -- random bits: codec.Noise
  static HLM_INLINE Lanes seed(uint64_t key, int64_t block) {
    const uint32x4_t start = vdupq_n_u32(uint32_t(block) * 16 * 0x9E3779B9u + uint32_t(key));
    const uint32_t numbers[4] = {0, 1, 2, 3};
    Lanes out;
    for (uint32_t i = 0; i < 4; i++) {
      const uint32x4_t lane = vaddq_u32(vld1q_u32(numbers), vdupq_n_u32(4 * i));
      uint32x4_t x = vaddq_u32(vmulq_u32(lane, vdupq_n_u32(0x9E3779B9u)), start);
      x = vmulq_u32(veorq_u32(x, vshrq_n_u32(x, 16)), vdupq_n_u32(0x85EBCA6Bu));
      x = vmulq_u32(veorq_u32(x, vshrq_n_u32(x, 13)), vdupq_n_u32(0xC2B2AE35u));
      out.v[i] = veorq_u32(veorq_u32(x, vshrq_n_u32(x, 16)), vdupq_n_u32(uint32_t(key >> 32)));
    }
    return out;
  }
  static HLM_INLINE Draw draw(Lanes& lanes) {
    const Draw out = lanes;
    for (uint32x4_t& x : lanes.v) {
      x = veorq_u32(x, vshlq_n_u32(x, 13));
      x = veorq_u32(x, vshrq_n_u32(x, 17));
      x = veorq_u32(x, vshlq_n_u32(x, 5));
    }
    return out;
  }
  static HLM_INLINE void store_draw(uint16_t* p, Draw draw) {
    for (int i = 0; i < 4; i++) store_codes(p + 8 * i, vreinterpretq_u8_u32(draw.v[i]));
  }
  // The lower and the upper bytes of a draw's words: m's noise, and exchanged v's.
  template <int kSub>
  static HLM_INLINE W2 noise_bytes(const Draw& draw) {
    const uint16x8_t words = vreinterpretq_u16_u32(draw.v[kSub]);
    return {{vandq_u16(words, vdupq_n_u16(255)), vshrq_n_u16(words, 8)}};
  }
  static HLM_INLINE W2 exchange(W2 a) { return {{a.v[1], a.v[0]}}; }
  // The extension's noise, and half a unit of the weight's last place.
  static HLM_INLINE W2 extension_noise(W2 a) {
    const uint16x8_t upper = veorq_u16(a.v[1], vdupq_n_u16(0x8000));
    return {{veorq_u16(a.v[0], upper), veorq_u16(a.v[0], vextq_u16(upper, upper, 2))}};
  }
  template <int kSub>
  static HLM_INLINE W2 noise_words(const Draw (&draws)[2]) {
    return {{vreinterpretq_u16_u32(draws[0].v[kSub]), vreinterpretq_u16_u32(draws[1].v[kSub])}};
  }

 private:
  // Floats of which `high` are the upper words and `low` the lower ones.
  static HLM_INLINE F4 floats(uint16x8_t low0, uint16x8_t low1, uint16x8_t high0, uint16x8_t high1) {
    return {{vreinterpretq_f32_u16(vzip1q_u16(low0, high0)), vreinterpretq_f32_u16(vzip2q_u16(low0, high0)),
             vreinterpretq_f32_u16(vzip1q_u16(low1, high1)), vreinterpretq_f32_u16(vzip2q_u16(low1, high1))}};
  }
  // The floats' bits plus the words.
  static HLM_INLINE void add_words(F4 a, W2 words, uint16x8_t (&out)[4]) {
    for (int k = 0; k < 4; k++) {
      const uint16x8_t two = words.v[k / 2];
      const uint32x4_t by = k % 2 ? vmovl_high_u16(two) : vmovl_u16(vget_low_u16(two));
      out[k] = vreinterpretq_u16_u32(vaddq_u32(vreinterpretq_u32_f32(a.v[k]), by));
    }
  }
  static HLM_INLINE B high_bytes(uint16x8_t a, uint16x8_t b) {
    return vuzp2q_u8(vreinterpretq_u8_u16(a), vreinterpretq_u8_u16(b));
  }
};

// Rows of 4 bits; what PlainFours does otherwise.
struct NeonFours : PlainFours {
  using PlainFours::look_up;

  template <class T>
  static HLM_INLINE typename T::Bits last(const typename T::Word* x) {
    if constexpr (sizeof(typename T::Word) == 2) {
      uint16x8_t most = vdupq_n_u16(0);
      for (int i = 0; i < kFour; i += 8) {
        const uint16x8_t bits = vld1q_u16(x + i);
        most = vmaxq_u16(most, vsriq_n_u16(vshlq_n_u16(bits, 1), bits, 15));
      }
      return vmaxvq_u16(most);
    } else {
      return PlainFours::last<T>(x);
    }
  }

  static HLM_INLINE void look_up(const uint16_t* __restrict words, const uint8_t* __restrict codes,
                                 uint16_t* __restrict x) {
    const uint8x16x2_t tables = vld2q_u8(reinterpret_cast<const uint8_t*>(words));  // lower bytes, upper bytes
    const uint8x16_t bytes = vld1q_u8(codes);
    const uint8x16_t nibbles[2] = {vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8(bytes, 4)};
    for (int i = 0; i < 2; i++) {
      const uint8x16x2_t found = {{vqtbl1q_u8(tables.val[0], nibbles[i]), vqtbl1q_u8(tables.val[1], nibbles[i])}};
      vst2q_u8(reinterpret_cast<uint8_t*>(x + i * kFour / 2), found);
    }
  }
};

void triad(float* a, const float* b, const float* c, float s, int64_t n) {
  for (int64_t i = 0; i < n; i++) a[i] = b[i] + s * c[i];
}

}  // namespace

const hlm::Kernels hlm::kNeon = {step_blocks<Neon>, any_over<Neon>, weight_rows<NeonFours>, triad};
