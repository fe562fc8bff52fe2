// AVX2 and FMA: groups of 32 values.

#include "adam_any.h"
#include "common.h"
#include "weights_x86.h"
#include "x86.h"

namespace {

struct Vec256 {
  using F = __m256;
  using I = __m256i;
  static constexpr int kGroup = 32;
  struct F4 {
    F v[4];
  };
  struct W2 {
    I v[2];
  };
  struct Lanes {
    I v[2];
  };
  using Draw = Lanes;
  struct Table {
    uint8_t v[16];
  };

  HLM_X86_OPERATIONS(_mm256, si256)

  static HLM_INLINE void largest(F a, F b, float& most_a, float& most_b) { largest_of(a, b, most_a, most_b); }

  // -- memory
  static HLM_INLINE I load_codes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static HLM_INLINE void store_codes(void* p, I a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a); }
  static HLM_INLINE I load_bytes(const void* p) {
    return _mm256_permute4x64_epi64(load2(p, static_cast<const uint8_t*>(p) + 32), 0xD8);
  }
  static HLM_INLINE void store_bytes(void* p, I a) {
    store2(p, static_cast<uint8_t*>(p) + 32, _mm256_permute4x64_epi64(a, 0xD8));
  }
  static HLM_INLINE W2 load_words(const uint16_t* p) { return {{load_codes(p), load_codes(p + 32)}}; }
  static HLM_INLINE void store_words(uint16_t* p, W2 a) {
    store_codes(p, a.v[0]);
    store_codes(p + 32, a.v[1]);
  }
  static HLM_INLINE F4 load_floats(const float* p) {
    return {{as_float(load2(p, p + 8)), as_float(load2(p + 4, p + 12)), as_float(load2(p + 32, p + 40)),
             as_float(load2(p + 36, p + 44))}};
  }
  static HLM_INLINE void store_floats(float* p, F4 a) {
    for (int k = 0; k < 4; k++) {
      float* const to = p + k / 2 * 32 + k % 2 * 4;
      store2(to, to + 8, as_int(a.v[k]));
    }
  }
  static HLM_INLINE I lanes16(const uint8_t (&x)[16]) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  }
  template <int kNibble>
  static HLM_INLINE W2 lookup_words(const NibbleTable& table, I a) {
    const I codes = band(kNibble ? shr16<4>(a) : a, bytes(15));
    const I high = shuffle8(lanes16(table.high), codes), low = shuffle8(lanes16(table.low), codes);
    return {{low8(low, high), high8(low, high)}};
  }

  // -- comparisons
  static HLM_INLINE I where_magnitude16(I test, I x) { return _mm256_sign_epi16(x, band(test, words(0x7FFF))); }
  static HLM_INLINE I negate_where_negative16(I x, I sign) { return _mm256_sign_epi16(x, sign); }  // zero where zero
  static HLM_INLINE bool any_over16(I x, I limit) { return _mm256_movemask_epi8(_mm256_cmpgt_epi16(x, limit)) != 0; }
  static HLM_INLINE bool any_over32(I x, I limit) { return _mm256_movemask_epi8(_mm256_cmpgt_epi32(x, limit)) != 0; }

  // -- random bits
  static HLM_INLINE Lanes lane_numbers() {
    return {{_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)}};
  }
  // In every lane of 128 bits.
  static HLM_INLINE I next_dword(I a) { return _mm256_shuffle_epi32(a, 0x39); }
  static HLM_INLINE void store_draw(uint16_t* p, Draw draw) {
    store_codes(p, draw.v[0]);
    store_codes(p + 16, draw.v[1]);
  }

 private:
  static HLM_INLINE I load2(const void* low, const void* high) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(low))),
                                   _mm_loadu_si128(static_cast<const __m128i*>(high)), 1);
  }
  static HLM_INLINE void store2(void* low, void* high, I a) {
    _mm_storeu_si128(static_cast<__m128i*>(low), _mm256_castsi256_si128(a));
    _mm_storeu_si128(static_cast<__m128i*>(high), _mm256_extracti128_si256(a, 1));
  }
};

using Avx2 = X86<Vec256>;

}  // namespace

const hlm::Kernels hlm::kAvx2 = {step_blocks<Avx2>, any_over<Avx2>, weight_rows<X86Fours>, streaming_triad<Avx2>};
