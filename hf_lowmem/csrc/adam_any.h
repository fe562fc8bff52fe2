// The blocks that adam_block.h does not treat where they lie: rarer combinations of types, and a tensor's last block
// where it is not whole. Weights and gradients go through buffers of floats in the first-level cache.
#pragma once

#include "adam_block.h"

namespace {

constexpr uint32_t kHalfInf = 0x7C00u << 13;
// 2**112, by which fp16's exponents differ from fp32's, in a factor that fp32 holds.
constexpr float kHalfScale = 5192296858534827628530496329220096.0f;

HLM_INLINE uint32_t least(uint32_t a, uint32_t b) {
  return a < b ? a : b;
}

// -- one value ----------------------------------------------------------------------------------------------------
HLM_INLINE float from_bf16(uint16_t word) {
  return bits_float(uint32_t(word) << 16);
}

HLM_INLINE float from_f16(uint16_t word) {
  const uint32_t magnitude = uint32_t(word & 0x7FFF) << 13, sign = uint32_t(word & 0x8000) << 16;
  const uint32_t finite = float_bits(bits_float(magnitude) * kHalfScale);
  return bits_float((magnitude >= kHalfInf ? magnitude + 0x70000000u : finite) | sign);
}

// |x| as bits whose top ones, from bit 13, are the fp16 pattern: codec._half_magnitude.
HLM_INLINE uint32_t half_magnitude(float x) {
  return float_bits(bits_float(float_bits(x) & 0x7FFFFFFFu) * (1.0f / kHalfScale));
}

HLM_INLINE uint32_t half_sign(float x) {
  return (float_bits(x) >> 16) & 0x8000u;
}

HLM_INLINE uint16_t nearest_bf16(float x) {
  const uint32_t bits = float_bits(x), rounded = bits + 0x7FFFu + ((bits >> 16) & 1);
  return uint16_t(x == x ? rounded >> 16 : 0x7FC0u);
}

// What is subnormal in fp16 would be rounded twice if half_magnitude, subnormal itself, were rounded; fp16's smallest
// number is the last place of 0.5, so a sum rounds it once.
HLM_INLINE uint16_t nearest_f16(float x) {
  const float absolute = bits_float(float_bits(x) & 0x7FFFFFFFu);
  const uint32_t subnormal = float_bits(absolute + 0.5f) - float_bits(0.5f);
  const uint32_t magnitude = least(half_magnitude(x), kHalfInf);
  const uint32_t normal = (magnitude + 0xFFFu + ((magnitude >> 13) & 1)) >> 13;
  const uint32_t rounded = absolute < 1.0f / (1 << 14) ? subnormal : normal;
  return uint16_t((x == x ? rounded : 0x7E00u) | half_sign(x));
}

HLM_INLINE uint16_t stochastic_bf16(float x, uint16_t noise) {
  return uint16_t((float_bits(x) + noise) >> 16);
}

HLM_INLINE uint16_t stochastic_f16(float x, uint16_t noise) {
  return uint16_t((least(half_magnitude(x) + (noise >> 3), kHalfInf) >> 13) | half_sign(x));
}

HLM_INLINE float join_bf16(uint16_t word, int8_t extension) {
  const uint32_t low = (word & 0x7FFF) == 0 ? 0u : uint32_t(int32_t(extension)) << 8;
  return bits_float((uint32_t(word) << 16) + low);
}

HLM_INLINE float join_f16(uint16_t word, int8_t extension) {
  const int32_t sum = ((word & 0x7FFF) << 13) + int32_t(extension) * 32;
  const float magnitude = bits_float(uint32_t(sum < 0 ? 0 : sum)) * kHalfScale;
  return bits_float(float_bits(magnitude) | (uint32_t(word & 0x8000) << 16));
}

HLM_INLINE uint16_t split_bf16(float x, uint16_t noise, int8_t& extension) {
  const uint32_t y = float_bits(x) + noise;
  extension = int8_t(uint8_t(y >> 8));
  return uint16_t((y + 0x8000u) >> 16);
}

HLM_INLINE uint16_t split_f16(float x, uint16_t noise, int8_t& extension) {
  const uint32_t y = least(half_magnitude(x) + (noise >> 3), kHalfInf);
  extension = int8_t(uint8_t(y >> 5));
  return uint16_t(((y + 0x1000u) >> 13) | half_sign(x));
}

// -- one block ----------------------------------------------------------------------------------------------------
// Reads a block's gradient; false where it holds one over the limit.
inline bool read_grad(const hlm_adam_tensor& t, int64_t at, int n, float* out) {
  uint32_t largest = 0;
  if (t.grad_dtype == HLM_F32) {
    memcpy(out, static_cast<const float*>(t.grad) + at, n * sizeof(float));
    for (int i = 0; i < n; i++) {
      const uint32_t magnitude = float_bits(out[i]) & 0x7FFFFFFFu;
      largest = magnitude > largest ? magnitude : largest;
    }
  } else {
    uint16_t words[kLargestBlock];
    memcpy(words, static_cast<const uint16_t*>(t.grad) + at, n * sizeof(uint16_t));
    for (int i = 0; i < n; i++) {
      const uint32_t magnitude = words[i] & 0x7FFFu;
      largest = magnitude > largest ? magnitude : largest;
    }
    if (t.grad_dtype == HLM_BF16) {
      for (int i = 0; i < n; i++) out[i] = from_bf16(words[i]);
    } else {
      for (int i = 0; i < n; i++) out[i] = from_f16(words[i]);
    }
  }
  return largest <= t.grad_limit;
}

inline void read_weight(const hlm_adam_tensor& t, int64_t at, int n, float* out) {
  if (t.weight_dtype == HLM_F32) {
    memcpy(out, static_cast<const float*>(t.weight) + at, n * sizeof(float));
    return;
  }
  uint16_t words[kLargestBlock];
  memcpy(words, static_cast<const uint16_t*>(t.weight) + at, n * sizeof(uint16_t));
  const int8_t* extension = t.extension ? t.extension + at : nullptr;
  if (t.weight_dtype == HLM_BF16) {
    if (extension) {
      for (int i = 0; i < n; i++) out[i] = join_bf16(words[i], extension[i]);
    } else {
      for (int i = 0; i < n; i++) out[i] = from_bf16(words[i]);
    }
  } else if (extension) {
    for (int i = 0; i < n; i++) out[i] = join_f16(words[i], extension[i]);
  } else {
    for (int i = 0; i < n; i++) out[i] = from_f16(words[i]);
  }
}

inline void write_copy(const hlm_adam_tensor& t, int64_t at, int n, const float* in) {
  uint16_t words[kLargestBlock];
  if (t.copy_dtype == HLM_BF16) {
    for (int i = 0; i < n; i++) words[i] = nearest_bf16(in[i]);
  } else {
    for (int i = 0; i < n; i++) words[i] = nearest_f16(in[i]);
  }
  memcpy(static_cast<uint16_t*>(t.copy) + at, words, n * sizeof(uint16_t));
}

inline void write_weight(const hlm_adam_tensor& t, int64_t at, int n, const float* in, const uint16_t* noise) {
  if (t.weight_dtype == HLM_F32) {
    memcpy(static_cast<float*>(t.weight) + at, in, n * sizeof(float));
    if (t.copy) write_copy(t, at, n, in);
    return;
  }
  uint16_t words[kLargestBlock];
  if (t.extension) {
    int8_t* extension = t.extension + at;
    if (t.weight_dtype == HLM_BF16) {
      for (int i = 0; i < n; i++) words[i] = split_bf16(in[i], noise[i], extension[i]);
    } else {
      for (int i = 0; i < n; i++) words[i] = split_f16(in[i], noise[i], extension[i]);
    }
  } else if (t.weight_dtype == HLM_BF16) {
    for (int i = 0; i < n; i++) words[i] = stochastic_bf16(in[i], noise[i]);
  } else {
    for (int i = 0; i < n; i++) words[i] = stochastic_f16(in[i], noise[i]);
  }
  memcpy(static_cast<uint16_t*>(t.weight) + at, words, n * sizeof(uint16_t));
}

// The random bits of a block's extensions: those of m and of v, combined.
template <class G, int kBlock>
void extension_noise(typename G::Lanes lanes, uint16_t* out) {
  uint16_t words[kHalf / 2];
  for (int at = 0; at < kBlock; at += kHalf) {
    G::store_draw(words, G::draw(lanes));
    for (int i = 0; i < kHalf; i++) {
      const int lower = i % 32, upper = i < 32 ? lower : lower / 8 * 8 + (lower + 2) % 8;
      out[at + i] = uint16_t((words[lower] ^ words[upper] >> 8) & 255);
    }
  }
}

// Steps blocks of any types; the last one may be cut short by the tensor's end.
template <class G, int kBits>
int64_t step_any_blocks(const hlm_adam_tensor& t, int64_t first, int64_t last) {
  constexpr int kBlock = Format<kBits>::kBlock, kBlockBytes = Format<kBits>::kBlockBytes;
  typename AdamBlocks<G, Weight::kF32, Grad::kF32, kBits>::Memory memory;
  AdamBlocks<G, Weight::kF32, Grad::kF32, kBits> blocks(t, memory);
  float grad[kBlock] = {}, weight[kBlock] = {};
  uint16_t noise[kBlock];
  uint8_t m[kBlockBytes], v[kBlockBytes];
  const bool stochastic = t.weight_dtype != HLM_F32 && !t.extension;
  int64_t skipped = 0;
  for (int64_t b = first; b < last; b++) {
    const int64_t at = b * kBlock;
    const int n = t.n - at < kBlock ? int(t.n - at) : kBlock;
    if (n < kBlock) memset(grad, 0, sizeof grad);
    const bool good = read_grad(t, at, n, grad);
    read_weight(t, at, n, weight);
    if (!good) {
      if (t.copy) write_copy(t, at, n, weight);
      skipped++;
      continue;
    }
    auto lanes = G::seed(t.key, t.start / kBlock + b);
    const uint32_t dither = dither_word(t.key, t.start / kBlock + b);
    if (stochastic) {
      for (int i = 0; i < kBlock; i += 32) G::store_draw(noise + i, G::draw(lanes));
    } else if (t.extension) {
      extension_noise<G, kBlock>(lanes, noise);
    }
    BlockData data = {};
    data.weight = weight;
    data.grad = grad;
    data.m = static_cast<uint8_t*>(t.m) + b * kBlockBytes;
    data.v = static_cast<uint8_t*>(t.v) + b * kBlockBytes;
    data.m_scale = kBits == 32 ? nullptr : t.m_scale + b;
    data.v_scale = kBits == 32 ? nullptr : t.v_scale + b;
    const int bytes = kBits == 4 ? kBlockBytes : n * kBits / 8;  // 4-bit blocks are always whole
    if (bytes == kBlockBytes) {
      blocks.step(data, lanes, dither);
    } else {  // what lies behind the end is zero
      memset(m, kBits == 8 ? 0x80 : 0, sizeof m);
      memset(v, 0, sizeof v);
      memcpy(m, data.m, bytes);
      memcpy(v, data.v, bytes);
      uint8_t *const m_home = data.m, *const v_home = data.v;
      data.m = m;
      data.v = v;
      blocks.step(data, lanes, dither);
      blocks.flush();
      memcpy(m_home, m, bytes);
      memcpy(v_home, v, bytes);
    }
    write_weight(t, at, n, weight, noise);
  }
  blocks.flush();
  return skipped;
}

// -- many values, only looked at ----------------------------------------------------------------------------------
template <class Word>
bool any_word_over(const uint8_t* x, int64_t n, uint32_t limit) {
  constexpr Word kMagnitude = Word(~Word(0)) >> 1;
  Word words[kLargestBlock];
  uint32_t largest = 0;
  for (int64_t at = 0; at < n; at += kLargestBlock) {
    const int count = n - at < kLargestBlock ? int(n - at) : kLargestBlock;
    memcpy(words, x + at * sizeof(Word), count * sizeof(Word));
    for (int i = 0; i < count; i++) {
      const uint32_t magnitude = words[i] & kMagnitude;
      largest = magnitude > largest ? magnitude : largest;
    }
  }
  return largest > limit;
}

// `wide`: values of 4 bytes, not 2.
template <class G>
bool any_over(const void* values, bool wide, int64_t n, uint32_t limit) {
  const uint8_t* x = static_cast<const uint8_t*>(values);
  const int64_t whole = G::kInPlace ? n / kLargestBlock * kLargestBlock : 0;
  if constexpr (G::kInPlace) {
    for (int64_t at = 0; at < whole; at += kLargestBlock) {
      if (wide ? G::template any_over<4, kLargestBlock>(x + 4 * at, limit)
               : G::template any_over<2, kLargestBlock>(x + 2 * at, limit))
        return true;
    }
  }
  return wide ? any_word_over<uint32_t>(x + 4 * whole, n - whole, limit)
              : any_word_over<uint16_t>(x + 2 * whole, n - whole, limit);
}

// -- a tensor's blocks --------------------------------------------------------------------------------------------
using Steps = int64_t (*)(const hlm_adam_tensor&, int64_t, int64_t);

// The kernel that steps a tensor's whole blocks in place; null where its types have none.
template <class G, int kBits>
Steps whole_blocks_kernel(const hlm_adam_tensor& t) {
  if constexpr (!G::kInPlace) {
    return nullptr;
  } else {
    if (t.weight_dtype == HLM_F32 && t.grad_dtype == HLM_F32 && !t.copy)
      return step_whole_blocks<G, Weight::kF32, Grad::kF32, kBits>;
    if (t.weight_dtype != HLM_BF16 || t.grad_dtype != HLM_BF16) return nullptr;
    return t.extension ? step_whole_blocks<G, Weight::kBf16Extended, Grad::kBf16, kBits>
                       : step_whole_blocks<G, Weight::kBf16Stochastic, Grad::kBf16, kBits>;
  }
}

template <class G, int kBits>
int64_t step_blocks_of(const hlm_adam_tensor& t, int64_t first, int64_t last) {
  int64_t skipped = 0, whole = t.n / Format<kBits>::kBlock;
  if (whole > last) whole = last;
  const Steps steps = whole_blocks_kernel<G, kBits>(t);
  if (steps && first < whole) {
    skipped = steps(t, first, whole);
    first = whole;
  }
  return first < last ? skipped + step_any_blocks<G, kBits>(t, first, last) : skipped;
}

template <class G>
int64_t step_blocks(const hlm_adam_tensor& t, int64_t first, int64_t last) {
  if (t.bits == 4) return step_blocks_of<G, 4>(t, first, last);
  if (t.bits == 8) return step_blocks_of<G, 8>(t, first, last);
  return step_blocks_of<G, 32>(t, first, last);
}

}  // namespace
