// AVX-512 F, BW, VL and DQ: groups of 64 values.

#include "adam_any.h"
#include "common.h"
#include "weights_x86.h"
#include "x86.h"

namespace {

struct Vec512 {
  using F = __m512;
  using I = __m512i;
  static constexpr int kGroup = 64;
  struct F4 {
    F v[4];
  };
  struct W2 {
    I v[2];
  };
  struct Lanes {
    I v[1];
  };
  using Draw = Lanes;

  HLM_X86_OPERATIONS(_mm512, si512)

  static HLM_INLINE void largest(F a, F b, float& most_a, float& most_b) {
    largest_of(_mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1)),
               _mm256_max_ps(_mm512_castps512_ps256(b), _mm512_extractf32x8_ps(b, 1)), most_a, most_b);
  }

  // -- memory
  static HLM_INLINE I load_codes(const void* p) { return _mm512_loadu_si512(p); }
  static HLM_INLINE void store_codes(void* p, I a) { _mm512_storeu_si512(p, a); }
  static HLM_INLINE I load_bytes(const void* p) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), load_codes(p));
  }
  static HLM_INLINE void store_bytes(void* p, I a) {
    store_codes(p, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), a));
  }
  static HLM_INLINE W2 load_words(const uint16_t* p) { return {{load_codes(p), load_codes(p + 32)}}; }
  static HLM_INLINE void store_words(uint16_t* p, W2 a) {
    store_codes(p, a.v[0]);
    store_codes(p + 32, a.v[1]);
  }
  static HLM_INLINE F4 load_floats(const float* p) {
    F4 out;
    for (int i = 0; i < 2; i++) {
      const F a = load_unaligned(p + 32 * i), b = load_unaligned(p + 32 * i + 16);
      out.v[2 * i] = _mm512_shuffle_f32x4(a, b, 0x88);
      out.v[2 * i + 1] = _mm512_shuffle_f32x4(a, b, 0xDD);
    }
    return out;
  }
  static HLM_INLINE void store_floats(float* p, F4 a) {
    const I first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (int i = 0; i < 2; i++) {
      const I x = as_int(a.v[2 * i]), y = as_int(a.v[2 * i + 1]);
      store_codes(p + 32 * i, _mm512_permutex2var_epi64(x, first, y));
      store_codes(p + 32 * i + 16, _mm512_permutex2var_epi64(x, second, y));
    }
  }
  static HLM_INLINE I lanes16(const uint8_t (&x)[16]) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }
  // The lower nibble of a word, and one bit more, choose among 32 words: the table's 16, twice.
  template <int kNibble>
  static HLM_INLINE W2 lookup_words(const NibbleTable& table, I a) {
    const I high = lanes16(table.high), low = lanes16(table.low);
    const I every = _mm512_mask_blend_epi64(0xCC, low8(low, high), high8(low, high));
    const I codes = kNibble ? shr16<4>(a) : a;
    return {
        {_mm512_permutexvar_epi16(low8(codes, codes), every), _mm512_permutexvar_epi16(high8(codes, codes), every)}};
  }

  // -- comparisons
  static HLM_INLINE I where_magnitude16(I test, I x) {
    return _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(test, words(0x7FFF)), x);
  }
  static HLM_INLINE I negate_where_negative16(I x, I sign) {
    return _mm512_mask_sub_epi16(x, _mm512_movepi16_mask(sign), zero(), x);
  }
  static HLM_INLINE bool any_over16(I x, I limit) { return _mm512_cmpgt_epi16_mask(x, limit) != 0; }
  static HLM_INLINE bool any_over32(I x, I limit) { return _mm512_cmpgt_epi32_mask(x, limit) != 0; }

  // -- random bits
  static HLM_INLINE Lanes lane_numbers() {
    return {{_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}};
  }
  // In every lane of 128 bits.
  static HLM_INLINE I next_dword(I a) { return _mm512_shuffle_epi32(a, _MM_PERM_ENUM(0x39)); }
  static HLM_INLINE void store_draw(uint16_t* p, Draw draw) { store_codes(p, draw.v[0]); }
};

using Avx512 = X86<Vec512>;

}  // namespace

const hlm::Kernels hlm::kAvx512 = {step_blocks<Avx512>, any_over<Avx512>, weight_rows<X86Fours>,
                                   streaming_triad<Avx512>};
