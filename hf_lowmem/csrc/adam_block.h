// The AdamW step of whole blocks, written once over a group of vectors G that each instruction set provides.
//
// G treats G::kGroup values at a time: one register of bytes (B), two of 16-bit words (W2), four of floats (F4). Half
// of a group's values lie side by side, the other half 32 values further on; so 16-bit words are loaded and stored in
// their order, and the bytes of 4-bit codes, whose order is ours to choose (codec.StateCodec), as they lie. How the
// values lie in the other registers is G's affair; the functions that load, store, unpack and pack agree about it.
//
// A block is encoded only when its largest magnitudes are known, so it takes two passes: the update, which the divider
// bounds, and the encoding, which it does not. The encoding of a block is interleaved with the update of the next one.
#pragma once

#include <utility>

#include "common.h"

namespace {

enum class Weight { kF32, kBf16Extended, kBf16Stochastic };
enum class Grad { kF32, kBf16 };

// Where one block's values are.
struct BlockData {
  void* weight;
  int8_t* extension;
  const void* grad;
  uint8_t *m, *v;  // codes, or floats with 32-bit states
  float *m_scale, *v_scale;
};

// kAhead: how many blocks ahead memory is asked for; 0: not at all.
template <class G, Weight kWeight, Grad kGrad, int kBits, int kAhead = 0>
class AdamBlocks {
  using F = typename G::F;
  using F4 = typename G::F4;
  using W2 = typename G::W2;
  using B = typename G::B;
  using Lanes = typename G::Lanes;
  using Draw = typename G::Draw;
  using Fmt = Format<kBits>;
  using Subs = std::make_integer_sequence<int, kHalf / G::kGroup>;
  static constexpr int kBlock = Fmt::kBlock;
  static constexpr int kHalves = kBlock / kHalf;
  static constexpr bool kCoded = kBits != 32;
  // The extension is rounded by the same draws as the moments, and is written before these are encoded: kept till then.
  static constexpr bool kExtended = kWeight == Weight::kBf16Extended;
  // With nothing but floats about, any order of the values will do, and the fastest one is taken.
  static constexpr bool kPlain = !kCoded && kWeight == Weight::kF32 && kGrad == Grad::kF32;

 public:
  // What a block leaves in memory between its two passes. It lies outside of AdamBlocks: a vector's store may alias
  // anything whose address is known, and members that shared an object with the stored floats would be read and
  // written anew around every store instead of staying in registers.
  struct Moments {
    alignas(64) float m[kCoded ? kBlock : 1];
    alignas(64) float root[kCoded ? kBlock : 1];
    Draw draws[kExtended ? kHalves : 1];
  };
  struct Memory {
    Moments moments[2];
    alignas(64) uint8_t low_m[kHalf];
    alignas(64) uint8_t low_v[kHalf];
    alignas(64) uint8_t dummy[kCoded ? Fmt::kBlockBytes : 1];
  };

  HLM_INLINE AdamBlocks(const hlm_adam_tensor& t, Memory& memory)
      : c_m_(G::set1(t.c_m)),
        c_h_(G::set1(t.c_h)),
        root_correction_(G::set1(t.root_correction)),
        eps_(G::set1(t.eps)),
        step_size_(G::set1(t.step_size)),
        decay_(G::set1(t.decay)),
        b_m_(t.b_m),
        b_v_(t.b_v),
        now_(&memory.moments[0]),
        last_(&memory.moments[1]),
        low_m_(memory.low_m),
        low_v_(memory.low_v),
        dummy_(memory.dummy) {
    if (kCoded) {  // the first update encodes a block that nobody reads, and so needs no code of its own
      memset(static_cast<void*>(last_), 0, sizeof *last_);
      pending_ = {dummy_, dummy_, G::set1(0.0f), G::set1(0.0f), G::set1(0.0f), 0, 0, G::seed(0, 0)};
    }
  }

  // Updates a block and encodes the one before. `lanes` are the block's random bits, at the first one that is wanted;
  // `dither` is its dither_word.
  HLM_INLINE void step(const BlockData& data, Lanes lanes, uint32_t dither) {
    data_ = data;
    dither_ = dither;
    lanes_ = lanes;
    max_m_ = max_root_ = G::set1(0.0f);
    if (kCoded) {
      const float root_unit = *data.v_scale * b_v_;
      m_unit_ = G::set1(*data.m_scale * b_m_);
      v_unit_ = G::set1(root_unit * root_unit);
    } else {
      m_unit_ = G::set1(b_m_);
      v_unit_ = G::set1(b_v_);
    }
    if constexpr (kExtended) {  // all at once: the lanes need not outlast the first half in registers
      for (Draw& draw : now_->draws) draw = G::draw(lanes_);
    }
    every_half<true>();
    if (kCoded) close();
  }

  // Encodes the last block.
  HLM_INLINE void flush() {
    if (kCoded) {
      every_half<false>();
      pending_.m = pending_.v = dummy_;
    }
  }

 private:
  // A block that is updated and not yet encoded.
  struct Pending {
    uint8_t *m, *v;
    F m_inverse, root_inverse;
    F m_dither;               // of 8 bits
    uint32_t m_base, v_base;  // the floats' patterns that are written as zero, less the dither
    Lanes lanes;
  };

  // Where a group lies in its block.
  struct Place {
    int values;   // number of its first value; the second half's first is kHalf / 2 further on
    int ordinal;  // how many values are treated before
  };

  template <bool kUpdate>
  HLM_INLINE void every_half() {
    if (kBits == 4) {
      one_half<kUpdate, 0>(0, Subs());
      one_half<kUpdate, 1>(kHalf, Subs());
    } else {
      for (int at = 0; at < kBlock; at += kHalf) one_half<kUpdate, 0>(at, Subs());
    }
  }

  // kNibble: which nibble of a byte holds this half's codes.
  template <bool kUpdate, int kNibble, int... kSub>
  HLM_INLINE void one_half(int half, std::integer_sequence<int, kSub...>) {
    if constexpr (kCoded) draw_ = kExtended ? last_->draws[half / kHalf] : G::draw(pending_.lanes);
    if constexpr (kUpdate && kExtended) w_draw_[0] = now_->draws[half / kHalf];
    if constexpr (kUpdate && kWeight == Weight::kBf16Stochastic) {
      w_draw_[0] = G::draw(lanes_);
      w_draw_[1] = G::draw(lanes_);
    }
    (group<kUpdate, kNibble, kSub>({half + kSub * G::kGroup / 2, half + kSub * G::kGroup}), ...);
  }

  // Square roots and quotients take a processor's divider most of its time. Other work of about the same length, the
  // encoding of the last block, is put between them in the program: the divider's queue is short.
  template <bool kUpdate, int kNibble, int kSub>
  HLM_INLINE void group(Place at) {
    F4 m, root, ratio;
    W2 noise;
    if constexpr (kUpdate && kAhead > 0) prefetch(at);
    if constexpr (kUpdate) update_moments<kNibble>(at, m, root);
    if constexpr (kCoded) {
      noise = G::template noise_bytes<kSub>(draw_);
      encode_m<kNibble>(at, noise);
    }
    if constexpr (kUpdate) {
      for (int k = 0; k < 4; k++) ratio.v[k] = G::div(m.v[k], G::fma(root_correction_, root.v[k], eps_));
    }
    if constexpr (kCoded) encode_root<kNibble>(at, G::exchange(noise));
    if constexpr (kUpdate) {
      F4 w = load_weight(at);
      for (int k = 0; k < 4; k++) w.v[k] = G::fma(step_size_, ratio.v[k], G::mul(w.v[k], decay_));
      store_weight<kSub>(at, w);
    }
  }

  // A group's share of the cache lines of the block that is kAhead blocks further on.
  HLM_INLINE void prefetch(Place at) {
    prefetch_lines(data_.grad, at, kGrad == Grad::kF32 ? 32 : 16);
    prefetch_lines(data_.weight, at, kWeight == Weight::kF32 ? 32 : 16);
    if (kExtended) prefetch_lines(data_.extension, at, 8);
    prefetch_lines(data_.m, at, kBits);
    prefetch_lines(data_.v, at, kBits);
    if (kCoded && at.ordinal == 0) {
      G::prefetch(ahead(data_.m_scale, kAhead * sizeof(float)));
      G::prefetch(ahead(data_.v_scale, kAhead * sizeof(float)));
    }
  }

  // `bits`: of a value.
  static HLM_INLINE void prefetch_lines(const void* present, Place at, int bits) {
    constexpr int kLine = 64;
    const int first = at.ordinal * bits / 8, last = (at.ordinal + G::kGroup) * bits / 8;
    for (int i = (first + kLine - 1) / kLine * kLine; i < last; i += kLine)
      G::prefetch(ahead(present, kAhead * kBlock * bits / 8 + i));
  }

  // Numbers and not pointers are added, because a pointer must not leave its array. A prefetch may: it never faults.
  static HLM_INLINE const char* ahead(const void* present, size_t bytes) {
    return reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(present) + bytes);
  }

  template <int kNibble>
  HLM_INLINE void update_moments(Place at, F4& m, F4& root) {
    const F4 g = load_grad(at);
    F4 v;
    load_moments<kNibble>(at, m, v);
    for (int k = 0; k < 4; k++) {
      const F h = G::mul(g.v[k], c_h_);
      m.v[k] = G::fma(c_m_, g.v[k], G::mul(m.v[k], m_unit_));
      v.v[k] = G::fma(h, h, G::mul(v.v[k], v_unit_));
      root.v[k] = G::sqrt(v.v[k]);
    }
    if constexpr (kCoded) {
      for (int k = 0; k < 4; k++) {
        G::store(now_->m + at.ordinal + k * (G::kGroup / 4), m.v[k]);
        G::store(now_->root + at.ordinal + k * (G::kGroup / 4), root.v[k]);
        max_m_ = G::max(max_m_, G::abs(m.v[k]));
        max_root_ = G::max(max_root_, root.v[k]);
      }
    } else {
      store_floats(data_.m, at, m);
      store_floats(data_.v, at, v);
    }
  }

  // Takes the block's largest magnitudes for its scales and leaves it to be encoded.
  HLM_INLINE void close() {
    float m_scale, v_scale;
    G::largest(max_m_, max_root_, m_scale, v_scale);
    m_scale = block_scale(m_scale);
    v_scale = block_scale(v_scale);
    *data_.m_scale = m_scale;
    *data_.v_scale = v_scale;
    const uint32_t m_dither = (dither_ >> 20) & 63, v_dither = dither_ >> 26;
    const float m_inverse = inverse(m_scale, kLevels);
    pending_ = {data_.m,
                data_.v,
                G::set1(kBits == 8 ? m_inverse * 256 : m_inverse),
                G::set1(inverse(v_scale, Fmt::kTop)),
                G::set1((float(m_dither) - 31.5f) / 64),
                0x3F800000u - ((2 * m_dither + 1) << 8),
                0x40000000u - ((2 * v_dither + 1) << (8 - Fmt::kMantissa)),
                lanes_};
    Moments* const other = last_;
    last_ = now_;
    now_ = other;
  }

  static HLM_INLINE float block_scale(float largest) { return largest >= kSmallestScale ? largest : 0.0f; }
  static HLM_INLINE float inverse(float scale, float top) { return scale > 0 ? top / scale : 0.0f; }

  // Both moments' codes are rounded stochastically in fixed point with 8 fractional bits, and to these 8 bits by a
  // dither that the block's values share.
  template <int kNibble>
  HLM_INLINE void encode_m(Place at, W2 noise) {
    F4 m, scaled;
    for (int k = 0; k < 4; k++) {
      m.v[k] = G::load(last_->m + at.ordinal + k * (G::kGroup / 4));
      // In 4 bits one more than the magnitude is a float whose exponent is the code.
      scaled.v[k] = kBits == 8 ? G::fma(m.v[k], pending_.m_inverse, pending_.m_dither)
                               : G::fma(G::abs(m.v[k]), pending_.m_inverse, G::set1(1.0f));
    }
    if constexpr (kBits == 8) {
      store_codes<kNibble, 0x80>(pending_.m, low_m_, at, G::encode_m8(scaled, noise));
    } else {
      store_codes<kNibble, 0>(pending_.m, low_m_, at, G::encode_signed(scaled, m, pending_.m_base, noise));
    }
  }
  template <int kNibble>
  HLM_INLINE void encode_root(Place at, W2 noise) {
    F4 root;
    for (int k = 0; k < 4; k++)
      root.v[k] = G::mul(G::load(last_->root + at.ordinal + k * (G::kGroup / 4)), pending_.root_inverse);
    store_codes<kNibble, 0>(pending_.v, low_v_, at,
                            G::template encode_float<Fmt::kMantissa>(root, pending_.v_base, noise));
  }

  // kFlip: the sign bit of 8-bit codes that are stored with an offset. Low nibbles wait in `low` for the high ones.
  template <int kNibble, int kFlip>
  static HLM_INLINE void store_codes(uint8_t* to, uint8_t* low, Place at, B codes) {
    if constexpr (kBits == 8) {
      G::store_bytes(to + at.values, kFlip ? G::flip(codes, kFlip) : codes);
    } else if constexpr (kNibble == 0) {
      G::store_codes(low + at.ordinal, codes);
    } else {
      const B both = G::merge_nibbles(G::load_codes(low + at.ordinal - kHalf), codes);
      G::store_codes(to + at.ordinal - kHalf, both);
    }
  }

  // The moments in units of m_unit_ and v_unit_.
  template <int kNibble>
  HLM_INLINE void load_moments(Place at, F4& m, F4& v) {
    if constexpr (kBits == 4) {
      m = G::template lookup<kNibble>(kNibbleM, G::load_codes(data_.m + at.ordinal % kHalf));
      v = G::template lookup<kNibble>(kNibbleV, G::load_codes(data_.v + at.ordinal % kHalf));
    } else if constexpr (kBits == 8) {
      m = G::decode_m8(G::load_bytes(data_.m + at.values));
      v = G::decode_root8(G::load_bytes(data_.v + at.values));
      for (int k = 0; k < 4; k++) v.v[k] = G::mul(v.v[k], v.v[k]);
    } else {
      m = load_floats(data_.m, at);
      v = load_floats(data_.v, at);
    }
  }

  HLM_INLINE F4 load_floats(const void* from, Place at) {
    const float* p = static_cast<const float*>(from) + (kPlain ? at.ordinal : at.values);
    if constexpr (kPlain) {
      F4 x;
      for (int k = 0; k < 4; k++) x.v[k] = G::load_unaligned(p + k * (G::kGroup / 4));
      return x;
    } else {
      return G::load_floats(p);
    }
  }

  HLM_INLINE void store_floats(void* to, Place at, F4 x) {
    float* p = static_cast<float*>(to) + (kPlain ? at.ordinal : at.values);
    if constexpr (kPlain) {
      for (int k = 0; k < 4; k++) G::store_unaligned(p + k * (G::kGroup / 4), x.v[k]);
    } else {
      G::store_floats(p, x);
    }
  }

  HLM_INLINE F4 load_grad(Place at) {
    if constexpr (kGrad == Grad::kF32) {
      return load_floats(data_.grad, at);
    } else {
      return G::widen_bf16(G::load_words(static_cast<const uint16_t*>(data_.grad) + at.values));
    }
  }

  HLM_INLINE F4 load_weight(Place at) {
    if constexpr (kWeight == Weight::kF32) {
      return load_floats(data_.weight, at);
    } else {
      const W2 words = G::load_words(static_cast<uint16_t*>(data_.weight) + at.values);
      if constexpr (kExtended) {
        return G::join_bf16(words, G::load_bytes(data_.extension + at.values));
      } else {
        return G::widen_bf16(words);
      }
    }
  }

  template <int kSub>
  HLM_INLINE void store_weight(Place at, F4 w) {
    if constexpr (kWeight == Weight::kF32) {
      store_floats(data_.weight, at, w);
    } else {
      uint16_t* to = static_cast<uint16_t*>(data_.weight) + at.values;
      if constexpr (kExtended) {
        B extension;
        G::store_words(to, G::split_bf16(w, G::extension_noise(G::template noise_bytes<kSub>(w_draw_[0])), extension));
        G::store_bytes(data_.extension + at.values, extension);
      } else {
        G::store_words(to, G::round_bf16(w, G::template noise_words<kSub>(w_draw_)));
      }
    }
  }

  const F c_m_, c_h_, root_correction_, eps_, step_size_, decay_;
  const float b_m_, b_v_;
  BlockData data_;
  Lanes lanes_;
  uint32_t dither_;
  F m_unit_, v_unit_, max_m_, max_root_;
  Pending pending_;
  Draw draw_, w_draw_[2];
  Moments *now_, *last_;  // the block that is updated fills one, the one before is encoded from the other
  uint8_t *const low_m_, *const low_v_, *const dummy_;
};

// Steps whole blocks whose values the kernel reads and writes where they lie.
template <class G, Weight kWeight, Grad kGrad, int kBits>
int64_t step_whole_blocks(const hlm_adam_tensor& t, int64_t first, int64_t last) {
  constexpr int kBlock = Format<kBits>::kBlock;
  constexpr int kWeightBytes = kWeight == Weight::kF32 ? 4 : 2, kGradBytes = kGrad == Grad::kF32 ? 4 : 2;
  const int64_t number = t.start / kBlock;  // of the tensor's first block, for the random bits
  using Blocks = AdamBlocks<G, kWeight, kGrad, kBits, kBits == 4 ? G::kPrefetchBlocks : 0>;
  typename Blocks::Memory memory;
  Blocks blocks(t, memory);
  int64_t skipped = 0;
  for (int64_t b = first; b < last; b++) {
    const int64_t at = b * kBlock;
    const uint8_t* grad = static_cast<const uint8_t*>(t.grad) + at * kGradBytes;
    if (G::template any_over<kGradBytes, kBlock>(grad, t.grad_limit)) {
      skipped++;
      continue;
    }
    BlockData data = {};
    data.weight = static_cast<uint8_t*>(t.weight) + at * kWeightBytes;
    data.extension = kWeight == Weight::kBf16Extended ? t.extension + at : nullptr;
    data.grad = grad;
    data.m = static_cast<uint8_t*>(t.m) + b * Format<kBits>::kBlockBytes;
    data.v = static_cast<uint8_t*>(t.v) + b * Format<kBits>::kBlockBytes;
    data.m_scale = kBits == 32 ? nullptr : t.m_scale + b;
    data.v_scale = kBits == 32 ? nullptr : t.v_scale + b;
    blocks.step(data, G::seed(t.key, number + b), dither_word(t.key, number + b));
  }
  blocks.flush();
  return skipped;
}

}  // namespace
