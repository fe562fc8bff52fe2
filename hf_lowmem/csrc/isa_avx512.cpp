// AVX-512 F, BW, VL and DQ: groups of 64 values.

#include "adam_any.h"
#include "common.h"
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

  static HLM_INLINE float largest(F a) { return _mm512_reduce_max_ps(a); }

  // -- memory
  static HLM_INLINE I load_bytes(const void* p) { return _mm512_loadu_si512(p); }
  static HLM_INLINE void store_bytes(void* p, I a) { _mm512_storeu_si512(p, a); }
  static HLM_INLINE W2 load_words(const uint16_t* p) {
    const I a = load_bytes(p), b = load_bytes(p + 32);
    return {{_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xDD)}};
  }
  static HLM_INLINE void store_words(uint16_t* p, W2 a) {
    const I first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    store_bytes(p, _mm512_permutex2var_epi64(a.v[0], first, a.v[1]));
    store_bytes(p + 32, _mm512_permutex2var_epi64(a.v[0], second, a.v[1]));
  }
  static HLM_INLINE F4 load_floats(const float* p) {
    F4 a;
    for (int k = 0; k < 4; k++) a.v[k] = load_unaligned(p + 16 * k);
    return transpose(a);
  }
  static HLM_INLINE void store_floats(float* p, F4 a) {
    a = transpose(a);
    for (int k = 0; k < 4; k++) store_unaligned(p + 16 * k, a.v[k]);
  }
  static HLM_INLINE I lanes16(const uint8_t (&x)[16]) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }

  // -- comparisons
  static HLM_INLINE I where_not_zero16(I test, I x) {
    return _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(test, test), x);
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
  template <class Next>
  static HLM_INLINE W2 next_words(Next next) {
    const Draw a = next(), b = next();
    return {{_mm512_shuffle_i64x2(a.v[0], b.v[0], 0x88), _mm512_shuffle_i64x2(a.v[0], b.v[0], 0xDD)}};
  }
  static HLM_INLINE void store_draw(uint16_t* p, Draw draw) { store_bytes(p, draw.v[0]); }

 private:
  // Exchanges rows and columns of the 4 x 4 lanes of 128 bits.
  static HLM_INLINE F4 transpose(F4 a) {
    const F low01 = _mm512_shuffle_f32x4(a.v[0], a.v[1], 0x44), low23 = _mm512_shuffle_f32x4(a.v[2], a.v[3], 0x44);
    const F high01 = _mm512_shuffle_f32x4(a.v[0], a.v[1], 0xEE), high23 = _mm512_shuffle_f32x4(a.v[2], a.v[3], 0xEE);
    return {{_mm512_shuffle_f32x4(low01, low23, 0x88), _mm512_shuffle_f32x4(low01, low23, 0xDD),
             _mm512_shuffle_f32x4(high01, high23, 0x88), _mm512_shuffle_f32x4(high01, high23, 0xDD)}};
  }
};

using Avx512 = X86<Vec512>;

}  // namespace

const hlm::Kernels hlm::kAvx512 = {step_blocks<Avx512>, any_over<Avx512>, streaming_triad<Avx512>};
