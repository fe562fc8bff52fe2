// Groups of values on x86: adam_block.h's G over registers of 256 or 512 bits.
//
// Unpacking and packing stay within the 128-bit lanes, which is cheap, and decides where the values lie. Words are in
// their natural order, a group's first half in one register and the second half in another. A lane of bytes has 8 of
// either half; the first two registers of floats have 4 each of every lane of the first words. Only loading and storing
// bytes and floats has to move lanes (V::load_bytes and its like).
//
// V is a register width: the operations below, and those that differ between the widths.
#pragma once

#include <immintrin.h>

#include "common.h"

// The operations that differ only in their names. MM is _mm256 or _mm512, SI is si256 or si512.
// clang-format off
#define HLM_X86_OPERATIONS(MM, SI)                                                               \
  static HLM_INLINE F set1(float x) { return MM##_set1_ps(x); }                                  \
  static HLM_INLINE F mul(F a, F b) { return MM##_mul_ps(a, b); }                                \
  static HLM_INLINE F div(F a, F b) { return MM##_div_ps(a, b); }                                \
  static HLM_INLINE F fma(F a, F b, F c) { return MM##_fmadd_ps(a, b, c); }                      \
  static HLM_INLINE F sub(F a, F b) { return MM##_sub_ps(a, b); }                                \
  static HLM_INLINE F sqrt(F a) { return MM##_sqrt_ps(a); }                                      \
  static HLM_INLINE F max(F a, F b) { return MM##_max_ps(a, b); }                                \
  static HLM_INLINE F load(const float* p) { return MM##_load_ps(p); }                           \
  static HLM_INLINE F load_unaligned(const float* p) { return MM##_loadu_ps(p); }                \
  static HLM_INLINE void store(float* p, F a) { MM##_store_ps(p, a); }                           \
  static HLM_INLINE void store_unaligned(float* p, F a) { MM##_storeu_ps(p, a); }                \
  static HLM_INLINE void stream(float* p, F a) { MM##_stream_ps(p, a); }                         \
  static HLM_INLINE I as_int(F a) { return MM##_castps_##SI(a); }                                \
  static HLM_INLINE F as_float(I a) { return MM##_cast##SI##_ps(a); }                            \
  static HLM_INLINE I round_to_int(F a) { return MM##_cvtps_epi32(a); }                          \
  static HLM_INLINE I zero() { return MM##_setzero_##SI(); }                                     \
  static HLM_INLINE I bytes(uint8_t x) { return MM##_set1_epi8(static_cast<char>(x)); }          \
  static HLM_INLINE I words(uint16_t x) { return MM##_set1_epi16(static_cast<short>(x)); }       \
  static HLM_INLINE I dwords(uint32_t x) { return MM##_set1_epi32(static_cast<int>(x)); }        \
  static HLM_INLINE I band(I a, I b) { return MM##_and_##SI(a, b); }                             \
  static HLM_INLINE I bor(I a, I b) { return MM##_or_##SI(a, b); }                               \
  static HLM_INLINE I bxor(I a, I b) { return MM##_xor_##SI(a, b); }                             \
  static HLM_INLINE I add16(I a, I b) { return MM##_add_epi16(a, b); }                           \
  static HLM_INLINE I adds_u16(I a, I b) { return MM##_adds_epu16(a, b); }                       \
  static HLM_INLINE I add32(I a, I b) { return MM##_add_epi32(a, b); }                           \
  static HLM_INLINE I sub32(I a, I b) { return MM##_sub_epi32(a, b); }                           \
  static HLM_INLINE I mul32(I a, I b) { return MM##_mullo_epi32(a, b); }                         \
  static HLM_INLINE I max_i16(I a, I b) { return MM##_max_epi16(a, b); }                         \
  static HLM_INLINE I max_i32(I a, I b) { return MM##_max_epi32(a, b); }                         \
  template <int kBy> static HLM_INLINE I shl16(I a) { return MM##_slli_epi16(a, kBy); }          \
  template <int kBy> static HLM_INLINE I shr16(I a) { return MM##_srli_epi16(a, kBy); }          \
  template <int kBy> static HLM_INLINE I sar16(I a) { return MM##_srai_epi16(a, kBy); }          \
  template <int kBy> static HLM_INLINE I shl32(I a) { return MM##_slli_epi32(a, kBy); }          \
  template <int kBy> static HLM_INLINE I shr32(I a) { return MM##_srli_epi32(a, kBy); }          \
  template <int kBy> static HLM_INLINE I sar32(I a) { return MM##_srai_epi32(a, kBy); }          \
  static HLM_INLINE I shuffle8(I a, I by) { return MM##_shuffle_epi8(a, by); }                   \
  static HLM_INLINE I low8(I a, I b) { return MM##_unpacklo_epi8(a, b); }                        \
  static HLM_INLINE I high8(I a, I b) { return MM##_unpackhi_epi8(a, b); }                       \
  static HLM_INLINE I low16(I a, I b) { return MM##_unpacklo_epi16(a, b); }                      \
  static HLM_INLINE I high16(I a, I b) { return MM##_unpackhi_epi16(a, b); }                     \
  static HLM_INLINE I high32(I a, I b) { return MM##_unpackhi_epi32(a, b); }                     \
  static HLM_INLINE I low64(I a, I b) { return MM##_unpacklo_epi64(a, b); }                      \
  static HLM_INLINE I pack_i32(I a, I b) { return MM##_packs_epi32(a, b); }                      \
  static HLM_INLINE I pack_u32(I a, I b) { return MM##_packus_epi32(a, b); }                     \
  static HLM_INLINE I pack_i16(I a, I b) { return MM##_packs_epi16(a, b); }                      \
  static HLM_INLINE I pack_u16(I a, I b) { return MM##_packus_epi16(a, b); }
// clang-format on

namespace {

// The largest values of two registers, found together.
HLM_INLINE void largest_of(__m256 a, __m256 b, float& most_a, float& most_b) {
  const __m256 both = _mm256_max_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  most_a = _mm_cvtss_f32(x);
  most_b = _mm_cvtss_f32(_mm_shuffle_ps(x, x, 1));
}

template <class V>
struct X86 : V {
  using F = typename V::F;
  using I = typename V::I;
  using F4 = typename V::F4;
  using W2 = typename V::W2;
  using Lanes = typename V::Lanes;
  using Draw = typename V::Draw;
  using B = I;
  static constexpr bool kInPlace = true;
  // How many blocks of 4-bit states ahead memory is asked for; 0: not at all. Such a block is more instructions than a
  // processor looks ahead, and its arrays' pages end so often that the processor's own prefetching always begins anew:
  // without this, waiting for memory adds to the computing instead of hiding behind it. A Xeon (model 207) makes 11.3 G
  // parameters/s with it on 16 virtual cores and 10.0 without, 1.25 and 1.07 on one. On a Zen 4 it costs and brings
  // nothing; with 32-bit states, which compute little, it would cost two fifths there.
  static constexpr int kPrefetchBlocks = 8;

  static HLM_INLINE void prefetch(const char* p) { _mm_prefetch(p, _MM_HINT_T0); }

  static HLM_INLINE F abs(F a) { return V::as_float(V::band(V::as_int(a), V::dwords(0x7FFFFFFF))); }

  // -- weights and gradients
  static HLM_INLINE F4 widen_bf16(W2 a) { return floats(V::zero(), V::zero(), a.v[0], a.v[1]); }

  // (word << 16) + (extension << 8): the sum's borrow is taken from the words, 16 bits at a time.
  static HLM_INLINE F4 join_bf16(W2 a, B extension) {
    I low[2] = {V::low8(V::zero(), extension), V::high8(V::zero(), extension)};
    for (int i = 0; i < 2; i++) {
      low[i] = V::where_magnitude16(a.v[i], low[i]);  // a zero, of either sign, has no extension
      a.v[i] = V::add16(a.v[i], V::template sar16<15>(low[i]));
    }
    return floats(low[0], low[1], a.v[0], a.v[1]);
  }

  // With the extension's noise and the weight's rounding (extension_noise holds both) added at once the extension's
  // byte comes out with its sign bit flipped.
  static HLM_INLINE W2 split_bf16(F4 a, W2 noise, B& extension) {
    const I order = V::lanes16({2, 3, 6, 7, 10, 11, 14, 15, 1, 5, 9, 13, 1, 5, 9, 13});
    I x[4];  // of a lane: four words, four extensions, and these again
    widen(noise, x);
    for (int k = 0; k < 4; k++) x[k] = V::shuffle8(V::add32(V::as_int(a.v[k]), x[k]), order);
    extension = flip(V::low64(V::high32(x[0], x[1]), V::high32(x[2], x[3])), 0x80);
    return {{V::low64(x[0], x[1]), V::low64(x[2], x[3])}};
  }

  static HLM_INLINE W2 round_bf16(F4 a, W2 noise) {
    I x[4];
    widen(noise, x);
    for (int k = 0; k < 4; k++) x[k] = V::template shr32<16>(V::add32(V::as_int(a.v[k]), x[k]));
    return {{V::pack_u32(x[0], x[1]), V::pack_u32(x[2], x[3])}};
  }

  // Whether any of kCount values of kBytes each has magnitude bits over the limit. The bits of all of them together are
  // no less than those of any: where these are under the limit, as they mostly are, nothing is left to compare.
  template <int kBytes, int kCount>
  static HLM_INLINE bool any_over(const uint8_t* p, uint32_t limit) {
    constexpr int kStep = int(sizeof(I));
    const I magnitude = kBytes == 2 ? V::words(0x7FFF) : V::dwords(0x7FFFFFFF);
    const auto over = [&](I x) {
      return kBytes == 2 ? V::any_over16(x, V::words(uint16_t(limit))) : V::any_over32(x, V::dwords(limit));
    };
    I every = V::load_codes(p);
    for (int i = kStep; i < kCount * kBytes; i += kStep) every = V::bor(every, V::load_codes(p + i));
    if (!over(V::band(every, magnitude))) return false;
    I most = V::zero();
    for (int i = 0; i < kCount * kBytes; i += kStep) {
      const I x = V::band(V::load_codes(p + i), magnitude);
      most = kBytes == 2 ? V::max_i16(most, x) : V::max_i32(most, x);
    }
    return over(most);
  }

  // -- codes
  static HLM_INLINE B merge_nibbles(B low, B high) {
    return V::bor(V::band(low, V::bytes(15)), V::band(V::template shl16<4>(high), V::bytes(0xF0)));
  }
  static HLM_INLINE B flip(B a, uint8_t mask) { return V::bxor(a, V::bytes(mask)); }

  template <int kNibble>
  static HLM_INLINE F4 lookup(const NibbleTable& table, B a) {
    return widen_bf16(V::template lookup_words<kNibble>(table, a));
  }

  // Under the exponent of 2**23 a code is the last byte of 2**23 + code.
  static HLM_INLINE F4 decode_m8(B a) {
    const I exponent = V::words(0x4B00);
    F4 x = floats(V::low8(a, V::zero()), V::high8(a, V::zero()), exponent, exponent);
    for (int k = 0; k < 4; k++) x.v[k] = V::sub(x.v[k], V::set1(8388608.0f + 128.0f));
    return x;
  }
  static HLM_INLINE F4 decode_root8(B a) {
    const I two = V::words(0x4000);
    return floats(V::zero(), V::zero(), V::add16(V::template shl16<2>(V::low8(a, V::zero())), two),
                  V::add16(V::template shl16<2>(V::high8(a, V::zero())), two));
  }

  static HLM_INLINE B encode_m8(F4 m, W2 noise) {
    I x[4];
    for (int k = 0; k < 4; k++) x[k] = V::round_to_int(m.v[k]);
    return high_bytes(V::add16(V::pack_i32(x[0], x[1]), noise.v[0]), V::add16(V::pack_i32(x[2], x[3]), noise.v[1]));
  }
  // Exponent and first mantissa bits, counted from `base`.
  template <int kMantissa>
  static HLM_INLINE B encode_float(F4 a, uint32_t base, W2 noise) {
    const W2 codes = float_codes<kMantissa>(a, base, noise);
    return V::pack_u16(codes.v[0], codes.v[1]);
  }
  // Exponents, counted from `base`; negative where `sign` is.
  static HLM_INLINE B encode_signed(F4 a, F4 sign, uint32_t base, W2 noise) {
    W2 codes = float_codes<0>(a, base, noise);
    for (int i = 0; i < 2; i++) {
      const I by = V::pack_i32(V::as_int(sign.v[2 * i]), V::as_int(sign.v[2 * i + 1]));
      codes.v[i] = V::negate_where_negative16(codes.v[i], by);
    }
    return V::pack_i16(codes.v[0], codes.v[1]);
  }

  // -- random bits: codec.Noise
  static HLM_INLINE I seed_lanes(I lane, uint64_t key, int64_t block) {
    const uint32_t start = uint32_t(block) * 16 * 0x9E3779B9u + uint32_t(key);
    I x = V::add32(V::mul32(lane, V::dwords(0x9E3779B9u)), V::dwords(start));
    x = V::mul32(V::bxor(x, V::template shr32<16>(x)), V::dwords(0x85EBCA6Bu));
    x = V::mul32(V::bxor(x, V::template shr32<13>(x)), V::dwords(0xC2B2AE35u));
    return V::bxor(V::bxor(x, V::template shr32<16>(x)), V::dwords(uint32_t(key >> 32)));
  }
  static HLM_INLINE Lanes seed(uint64_t key, int64_t block) {
    Lanes out = V::lane_numbers();
    for (I& x : out.v) x = seed_lanes(x, key, block);
    return out;
  }
  static HLM_INLINE Lanes draw(Lanes& lanes) {
    const Lanes out = lanes;
    for (I& x : lanes.v) {
      x = V::bxor(x, V::template shl32<13>(x));
      x = V::bxor(x, V::template shr32<17>(x));
      x = V::bxor(x, V::template shl32<5>(x));
    }
    return out;
  }
  // The lower and the upper bytes of a draw's words: m's noise, and exchanged v's.
  template <int kSub>
  static HLM_INLINE W2 noise_bytes(const Lanes& draw) {
    return {{V::band(draw.v[kSub], V::words(255)), V::template shr16<8>(draw.v[kSub])}};
  }
  static HLM_INLINE W2 exchange(W2 a) { return {{a.v[1], a.v[0]}}; }
  // The extension's noise, and half a unit of the weight's last place.
  static HLM_INLINE W2 extension_noise(W2 a) {
    const I half = V::words(0x8000), upper = V::bxor(a.v[1], half);
    return {{V::bxor(a.v[0], upper), V::bxor(a.v[0], V::next_dword(upper))}};
  }
  template <int kSub>
  static HLM_INLINE W2 noise_words(const Draw (&draws)[2]) {
    return {{draws[0].v[kSub], draws[1].v[kSub]}};
  }

 private:
  // Floats of which `high` are the upper words and `low` the lower ones.
  static HLM_INLINE F4 floats(I low0, I low1, I high0, I high1) {
    return {{V::as_float(V::low16(low0, high0)), V::as_float(V::high16(low0, high0)),
             V::as_float(V::low16(low1, high1)), V::as_float(V::high16(low1, high1))}};
  }
  // Words to 32 bits, in the order of floats.
  static HLM_INLINE void widen(W2 a, I (&out)[4]) {
    for (int i = 0; i < 2; i++) {
      out[2 * i] = V::low16(a.v[i], V::zero());
      out[2 * i + 1] = V::high16(a.v[i], V::zero());
    }
  }
  template <int kMantissa>
  static HLM_INLINE W2 float_codes(F4 a, uint32_t base, W2 noise) {
    I x[4];
    for (int k = 0; k < 4; k++) x[k] = V::template sar32<15 - kMantissa>(V::sub32(V::as_int(a.v[k]), V::dwords(base)));
    return {{V::template shr16<8>(V::adds_u16(V::pack_u32(x[0], x[1]), noise.v[0])),
             V::template shr16<8>(V::adds_u16(V::pack_u32(x[2], x[3]), noise.v[1]))}};
  }
  static HLM_INLINE B high_bytes(I a, I b) { return V::pack_u16(V::template shr16<8>(a), V::template shr16<8>(b)); }
};

template <class G>
void streaming_triad(float* a, const float* b, const float* c, float s, int64_t n) {
  constexpr int kStep = int(sizeof(typename G::F) / sizeof(float));
  const typename G::F factor = G::set1(s);
  int64_t i = 0;
  for (; i < n && reinterpret_cast<uintptr_t>(a + i) % sizeof(factor) != 0; i++) a[i] = b[i] + s * c[i];
  for (; i + kStep <= n; i += kStep)
    G::stream(a + i, G::fma(factor, G::load_unaligned(c + i), G::load_unaligned(b + i)));
  for (; i < n; i++) a[i] = b[i] + s * c[i];
  _mm_sfence();
}

}  // namespace
