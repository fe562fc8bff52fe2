// Rows of 32 values in 4 bits on x86, in registers of 256 bits: what weights.h's PlainFours does, for 16-bit words.
// Unpacking and packing stay within the 128-bit lanes, so what is unpacked and packed again lies as it did.
#pragma once

#include <immintrin.h>

#include "weights.h"

namespace {

struct X86Fours : PlainFours {
  // The last of 8 words is found at once: it is the first of their complements.
  template <class T>
  static HLM_INLINE typename T::Bits last(const typename T::Word* x) {
    if constexpr (sizeof(typename T::Word) == 2) {
      const __m256i both = _mm256_max_epu16(order(load(x)), order(load(x + 16)));
      const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
      const __m128i first = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)));
      return typename T::Bits(~_mm_cvtsi128_si32(first));
    } else {
      return PlainFours::last<T>(x);
    }
  }

  template <class T>
  static HLM_INLINE void encode(const typename T::Word* __restrict x, float inverse, uint8_t* __restrict codes) {
    const __m256 by = _mm256_set1_ps(inverse);
    const __m256i low = units<T>(x, by), high = units<T>(x + 16, by);
    const __m256i both = _mm256_add_epi16(_mm256_add_epi16(low, _mm256_slli_epi16(high, 4)), _mm256_set1_epi16(0x88));
    store(codes, _mm_packus_epi16(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1)));
  }

  static HLM_INLINE void look_up(const float* __restrict values, const uint8_t* __restrict codes, float* __restrict x) {
    const __m256 low = _mm256_loadu_ps(values), high = _mm256_loadu_ps(values + 8);
    for (int at = 0; at < kFour / 2; at += 8) {
      const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + at)));
      _mm256_storeu_ps(x + at, chosen(low, high, bytes));
      _mm256_storeu_ps(x + kFour / 2 + at, chosen(low, high, _mm256_srli_epi32(bytes, 4)));
    }
  }

  static HLM_INLINE void look_up(const uint16_t* __restrict words, const uint8_t* __restrict codes,
                                 uint16_t* __restrict x) {
    // Of a lane: the words' lower bytes, then the upper ones.
    const __m256i order = _mm256_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15,  //
                                           0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    const __m256i tables = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(load(words), order), 0xD8);
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(bytes), _mm_srli_epi16(bytes, 4), 1);
    const __m256i nibbles = _mm256_and_si256(both, _mm256_set1_epi8(15));
    const __m256i low = _mm256_shuffle_epi8(_mm256_permute4x64_epi64(tables, 0x44), nibbles);
    const __m256i high = _mm256_shuffle_epi8(_mm256_permute4x64_epi64(tables, 0xEE), nibbles);
    const __m256i even = _mm256_unpacklo_epi8(low, high), odd = _mm256_unpackhi_epi8(low, high);
    store(x, _mm256_castsi256_si128(even));
    store(x + 8, _mm256_castsi256_si128(odd));
    store(x + 16, _mm256_extracti128_si256(even, 1));
    store(x + 24, _mm256_extracti128_si256(odd, 1));
  }

 private:
  static HLM_INLINE __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static HLM_INLINE void store(void* p, __m128i a) { _mm_storeu_si128(static_cast<__m128i*>(p), a); }

  // By the last 3 bits of an index, and the one before.
  static HLM_INLINE __m256 chosen(__m256 low, __m256 high, __m256i index) {
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index), _mm256_permutevar8x32_ps(high, index), upper);
  }

  static HLM_INLINE __m256i order(__m256i a) {
    return _mm256_or_si256(_mm256_add_epi16(a, a), _mm256_srli_epi16(a, 15));
  }

  // 16 values in units of their scale, as words; no less than -8, which is what -8.04 is rounded to.
  template <class T>
  static HLM_INLINE __m256i units(const typename T::Word* x, __m256 by) {
    __m256 low, high;
    if constexpr (sizeof(typename T::Word) == 2) {
      const __m256i words = load(x);
      low = widen<T>(_mm256_unpacklo_epi16(_mm256_setzero_si256(), words));
      high = widen<T>(_mm256_unpackhi_epi16(_mm256_setzero_si256(), words));
    } else {
      const __m256 a = _mm256_loadu_ps(x), b = _mm256_loadu_ps(x + 8);
      low = _mm256_permute2f128_ps(a, b, 0x20);
      high = _mm256_permute2f128_ps(a, b, 0x31);
    }
    const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(low, by)), b = _mm256_cvtps_epi32(_mm256_mul_ps(high, by));
    return _mm256_min_epi16(_mm256_packs_epi32(a, b), _mm256_set1_epi16(7));
  }

  // Of words that are the upper halves of floats' bits. An fp16's exponent lacks 112, its other bits lie 3 too far up.
  template <class T>
  static HLM_INLINE __m256 widen(__m256i a) {
    if constexpr (T::kHalf) {
      const __m256i sign = _mm256_set1_epi32(int(0x80000000u));
      const __m256 magnitude = _mm256_castsi256_ps(_mm256_srli_epi32(_mm256_andnot_si256(sign, a), 3));
      const __m256 finite = _mm256_mul_ps(magnitude, _mm256_set1_ps(kHalfScale));
      return _mm256_or_ps(finite, _mm256_castsi256_ps(_mm256_and_si256(sign, a)));
    } else {
      return _mm256_castsi256_ps(a);
    }
  }
};

}  // namespace
