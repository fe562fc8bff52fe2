// What every instruction set's file shares: the constants of the formats and how a file hands its kernels out.
//
// The headers of the core are compiled once for each instruction set, with other flags each time. Everything in them
// therefore lives in an anonymous namespace: were two files' copies of a function merged by the linker, a machine
// without AVX-512 could meet an AVX-512 instruction in a helper. Standard library templates are avoided for that
// reason.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "hf_lowmem.h"

#if defined(_MSC_VER)
#define HLM_INLINE __forceinline
#else
#define HLM_INLINE inline __attribute__((always_inline))
#endif

#if defined(__x86_64__) || defined(_M_X64)
#define HLM_X86 1
#elif defined(__aarch64__) || defined(_M_ARM64)
#define HLM_ARM 1
#endif

namespace hlm {

// One instruction set's entry points.
struct Kernels {
  // Steps the blocks [first, last) of a tensor; returns how many were left as they were.
  int64_t (*blocks)(const hlm_adam_tensor& tensor, int64_t first, int64_t last);
  // Whether a value's magnitude bits are over the limit.
  bool (*any_over)(const void* x, bool wide, int64_t n, uint32_t limit);
  // Does an action (hlm_weight_action) to the rows [first, last) of a weight.
  void (*weights)(int action, const hlm_weight& weight, int64_t first, int64_t last);
  void (*triad)(float* a, const float* b, const float* c, float s, int64_t n);
};

extern const Kernels kBase;
#if HLM_X86
extern const Kernels kAvx2, kAvx512;
#elif HLM_ARM
extern const Kernels kNeon;
#endif

// Values that share a scale; with fp32 states, values that share a seed.
constexpr int block_size(int bits) {
  return bits == 4 ? 128 : 256;
}

}  // namespace hlm

namespace {

constexpr float kLevels = 127.0f;  // what the largest m of a block is written as
constexpr int kHalf = 64;          // values that share a draw of random bits
constexpr int kLargestBlock = 256;
constexpr float kSmallestScale = 1.0f / (1 << 25) / (1 << 25) / (1 << 25) / (1 << 25);  // 2**-100

// A width of the states: codec.StateCodec.
template <int kBits>
struct Format {
  static constexpr int kBlock = hlm::block_size(kBits);
  static constexpr int kMantissa = kBits == 4 ? 1 : 5;
  static constexpr float kTop = kBits == 4 ? 1.5f * 256 : 1.96875f * 256;  // value of the last code of sqrt(v)
  static constexpr int kBlockBytes = kBlock * kBits / 8;                   // of one moment
};

// What the 16 codes of 4 bits stand for. Every value is exact in bf16, so two tables of bytes hold them all: a byte
// shuffle looks up 16 or more at once, and no conversion to fp32 is left to do.
struct NibbleTable {
  uint8_t high[16], low[16];
};

// m: 2**k - 1 for the code k, 1 - 2**k for 16 - k.
constexpr NibbleTable kNibbleM = {
    {0x00, 0x3F, 0x40, 0x40, 0x41, 0x41, 0x42, 0x42, 0xC3, 0xC2, 0xC2, 0xC1, 0xC1, 0xC0, 0xC0, 0xBF},
    {0x00, 0x80, 0x40, 0xE0, 0x70, 0xF8, 0x7C, 0xFE, 0x7F, 0xFE, 0x7C, 0xF8, 0x70, 0xE0, 0x40, 0x80}};

// The square of sqrt(v): 4 * 4**e for the code 2 e, 9 * 4**e for 2 e + 1.
constexpr NibbleTable kNibbleV = {
    {0x40, 0x41, 0x41, 0x42, 0x42, 0x43, 0x43, 0x44, 0x44, 0x45, 0x45, 0x46, 0x46, 0x47, 0x47, 0x48},
    {0x80, 0x10, 0x80, 0x10, 0x80, 0x10, 0x80, 0x10, 0x80, 0x10, 0x80, 0x10, 0x80, 0x10, 0x80, 0x10}};

// The bits of a block's dithers: codec.Noise.dithers.
HLM_INLINE uint32_t dither_word(uint64_t key, int64_t block) {
  return uint32_t(block) * 0x9E3779B9u + uint32_t(key >> 32);
}

HLM_INLINE uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

HLM_INLINE float bits_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

}  // namespace
