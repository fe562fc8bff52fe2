// Runs the core without Python: every instruction set of the machine over all types and the sizes around block edges,
// in heap buffers of exactly the right size (a sanitizer sees every byte too far). Prints a checksum for each case; the
// lines are the same on every machine. Exits with 1 where two instruction sets differ or an unknown tensor is accepted.

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <memory>
#include <vector>

#include "../../hf_lowmem/csrc/hf_lowmem.h"

namespace {

// Numbers that are the same everywhere: integers, and floats made from them without rounding.
struct Random {
  uint64_t state;
  uint32_t next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return uint32_t(state >> 33);
  }
  float uniform() { return float(next() >> 7) / float(1 << 24); }
  float wide() {
    const uint32_t exponent = 107 + next() % 20;
    const uint32_t bits = (next() & 1) << 31 | exponent << 23 | next() >> 8;
    float out;
    memcpy(&out, &bits, 4);
    return out;
  }
};

// A heap block of exactly the bytes asked for.
class Buffer {
 public:
  explicit Buffer(size_t size) : size_(size), bytes_(new uint8_t[size]()) {}
  void* data() const { return bytes_.get(); }
  void fill(Random& random) {
    for (size_t i = 0; i < size_; i++) bytes_[i] = uint8_t(random.next());
  }
  void fill_floats(Random& random, bool positive) {
    for (size_t i = 0; i + 4 <= size_; i += 4) {
      const float x = positive ? (random.uniform() + 0.5f) / 256 : random.wide();
      memcpy(&bytes_[i], &x, 4);
    }
  }
  // bf16 or fp16 words of either sign and any mantissa, with one of six exponents.
  void fill_words(Random& random, int mantissa, uint32_t exponent) {
    for (size_t i = 0; i + 2 <= size_; i += 2) {
      const uint32_t r = random.next(), fraction = r & ((1u << mantissa) - 1);
      const uint16_t word = uint16_t((r & 0x8000) | (exponent + (r >> 16) % 6) << mantissa | fraction);
      memcpy(&bytes_[i], &word, 2);
    }
  }
  void fill_values(Random& random, uint8_t dtype, uint32_t below_one) {
    if (dtype == HLM_F32) fill_floats(random, false);
    if (dtype == HLM_BF16) fill_words(random, 7, 127 - below_one);
    if (dtype == HLM_F16) fill_words(random, 10, 15 - below_one);
  }
  uint64_t checksum(uint64_t hash) const {
    for (size_t i = 0; i < size_; i++) hash = (hash ^ bytes_[i]) * 0x100000001B3u;
    return hash;
  }

 private:
  size_t size_;
  std::unique_ptr<uint8_t[]> bytes_;
};

struct Types {
  const char* name;
  uint8_t weight;
  bool extended;
  uint8_t copy;
};

constexpr Types kWeights[] = {
    {"f32", HLM_F32, false, HLM_NONE},    {"f32+bf16", HLM_F32, false, HLM_BF16},
    {"f32+f16", HLM_F32, false, HLM_F16}, {"bf16+ext", HLM_BF16, true, HLM_NONE},
    {"bf16", HLM_BF16, false, HLM_NONE},  {"f16+ext", HLM_F16, true, HLM_NONE},
    {"f16", HLM_F16, false, HLM_NONE},
};
constexpr const char* kGrads[] = {"f32", "bf16", "f16"};
constexpr int kSizes[] = {1, 63, 64, 65, 127, 129, 255, 256, 257, 1000, 2500};

size_t width(uint8_t dtype) {
  return dtype == HLM_F32 ? 4 : 2;
}

void set_constants(hlm_adam_tensor& t, int bits) {
  t.c_m = 0.1f;
  t.c_h = 0.0316227766f;
  t.b_m = bits == 4 ? 0.9f / 7 : bits == 8 ? 0.9f / 127 : 0.9f;
  t.b_v = bits == 4 ? 0.99949987f / 384 : bits == 8 ? 0.99949987f / 126976 : 0.999f;
  t.root_correction = 18.26f;
  t.eps = 1e-8f;
  t.step_size = -3.7e-3f;
  t.decay = 0.999f;
  t.grad_limit = t.grad_dtype == HLM_F32 ? 0x7F7FFFFF : t.grad_dtype == HLM_BF16 ? 0x7F7F : 0x7BFF;
}

// Two steps of one tensor, each in two parts; the checksum of all that it wrote.
uint64_t run_case(int isa, int bits, const Types& types, uint8_t grad, int n, int64_t& skipped) {
  Random random{uint64_t(bits * 1000003 + n)};
  const int block = bits == 4 ? 128 : 256, blocks = (n + block - 1) / block;
  const size_t moment = bits == 4 ? size_t(blocks) * 64 : size_t(n) * (bits / 8);
  Buffer weight(n * width(types.weight)), gradient(n * width(grad)), extension(n), copy(2 * size_t(n));
  Buffer m(moment), v(moment), m_scale(4 * size_t(blocks)), v_scale(4 * size_t(blocks));
  weight.fill_values(random, types.weight, 3);
  gradient.fill_values(random, grad, 8);
  extension.fill(random);
  m.fill(random);
  v.fill(random);
  m_scale.fill_floats(random, true);
  v_scale.fill_floats(random, true);
  if (bits == 32) {
    m.fill_floats(random, false);
    v.fill_floats(random, true);
  }
  if (n == 2500) memset(static_cast<uint8_t*>(gradient.data()) + 1300 * width(grad), 0xFF, width(grad));  // a NaN

  hlm_adam_tensor t = {};
  t.weight = weight.data();
  t.extension = types.extended ? static_cast<int8_t*>(extension.data()) : nullptr;
  t.copy = types.copy == HLM_NONE ? nullptr : copy.data();
  t.grad = gradient.data();
  t.m = m.data();
  t.v = v.data();
  t.m_scale = bits == 32 ? nullptr : static_cast<float*>(m_scale.data());
  t.v_scale = bits == 32 ? nullptr : static_cast<float*>(v_scale.data());
  t.n = n;
  t.start = 256 * int64_t(n % 5);
  t.weight_dtype = types.weight;
  t.copy_dtype = types.copy;
  t.grad_dtype = grad;
  t.bits = uint8_t(bits);
  set_constants(t, bits);
  skipped = 0;
  for (int step = 0; step < 2; step++) {
    t.key = 0x9E3779B97F4A7C15u * uint64_t(step + 1);
    skipped += hlm_adam(isa, &t, 1, 0, 1);
    int64_t next = 1;  // what two threads would do one after the other
    skipped += hlm_adam_shared(isa, &t, 1, 3, 1000, &next);
    skipped += hlm_adam_shared(isa, &t, 1, 3, 1000, &next);
  }
  uint64_t hash = 0xCBF29CE484222325u;
  for (const Buffer* buffer : {&weight, &gradient, &extension, &copy, &m, &v, &m_scale, &v_scale})
    hash = buffer->checksum(hash);
  return hash;
}

bool unknown_tensors_are_refused(int isa) {
  Buffer buffer(4096);
  hlm_adam_tensor good = {};
  good.weight = good.m = good.v = buffer.data();
  good.grad = buffer.data();
  good.bits = 32;
  hlm_adam_tensor bad[6] = {good, good, good, good, good, good};
  bad[0].bits = 5;
  bad[1].weight_dtype = 3;
  bad[2].grad_dtype = HLM_NONE;
  bad[3].copy = buffer.data();
  bad[3].copy_dtype = HLM_F32;
  bad[4].start = 100;
  bad[5].n = 1;
  bad[5].bits = 4;  // without scales
  for (const hlm_adam_tensor& t : bad) {
    const hlm_adam_tensor pair[2] = {good, t};
    if (hlm_adam(isa, pair, 2, 0, 1) != -1) return false;
  }
  int64_t none = 0;
  if (hlm_adam_shared(HLM_ISA_COUNT, &good, 1, 1, 1, &none) != -1) return false;
  return hlm_adam(isa, &good, 1, 0, 1) == 0 && hlm_adam(HLM_ISA_COUNT, &good, 1, 0, 1) == -1;
}

bool triad_is_right(int isa) {
  for (int n : {0, 1, 7, 64, 101}) {
    Buffer a(4 * size_t(n)), b(4 * size_t(n)), c(4 * size_t(n));
    float *to = static_cast<float*>(a.data()), *x = static_cast<float*>(b.data()), *y = static_cast<float*>(c.data());
    for (int i = 0; i < n; i++) {
      x[i] = float(i);
      y[i] = float(2 * i);
    }
    hlm_triad(isa, to, x, y, 0.5f, n);
    for (int i = 0; i < n; i++) {
      if (to[i] != float(2 * i)) return false;
    }
  }
  return true;
}

bool any_over_is_right(int isa) {
  for (int dtype : {HLM_F32, HLM_BF16, HLM_F16}) {
    const size_t width = dtype == HLM_F32 ? 4 : 2;
    for (int n : {0, 1, 7, 255, 256, 257, 1000}) {
      Buffer x(width * size_t(n));
      uint8_t* bytes = static_cast<uint8_t*>(x.data());
      for (size_t i = 0; i < width * size_t(n); i++) bytes[i] = uint8_t(i % width == width - 1 ? 0x80 : 1);  // negative
      const uint32_t least = width == 4 ? 0x00010101u : 0x0001u;
      if (hlm_any_over(isa, dtype, bytes, n, least) != 0) return false;
      if (hlm_any_over(isa, dtype, bytes, n, least - 1) != (n > 0)) return false;
      for (int at : {0, n / 2, n - 1}) {
        if (at < 0 || at >= n) continue;
        bytes[width * size_t(at)] = 2;
        if (hlm_any_over(isa, dtype, bytes, n, least) != 1) return false;
        bytes[width * size_t(at)] = 1;
      }
    }
  }
  return hlm_any_over(isa, HLM_NONE, nullptr, 0, 0) == -1 && hlm_any_over(HLM_ISA_COUNT, HLM_F32, nullptr, 0, 0) == -1;
}

// Prints the case's line; the number of failures.
int check_case(const std::vector<int>& isas, int bits, const Types& types, uint8_t grad, int n) {
  int64_t skipped = 0, skipped_here = 0;
  const uint64_t hash = run_case(HLM_BASE, bits, types, grad, n, skipped);
  printf("%2d bits, weight %-8s, grad %-4s, %4d values: %016llx, %d skipped\n", bits, types.name, kGrads[grad], n,
         static_cast<unsigned long long>(hash), int(skipped));
  int failures = 0;
  if (skipped != (n == 2500 ? 2 : 0)) failures += printf("  wrong number of skipped blocks\n") > 0;
  for (int isa : isas) {
    if (run_case(isa, bits, types, grad, n, skipped_here) != hash || skipped_here != skipped)
      failures += printf("  isa %d differs\n", isa) > 0;
  }
  return failures;
}

// -- weights ------------------------------------------------------------------------------------------------------
constexpr int kShapes[][2] = {{1, 1}, {3, 31}, {40, 32}, {5, 100}, {2, 4096}, {17, 1000}, {2, 20000}};

// Encodes a weight, decodes it and, if it can be, recodes it; the checksum of all that was written.
uint64_t run_weight(int isa, int bits, uint8_t dtype, int rows, int columns) {
  Random random{uint64_t(rows * 1000003 + columns)};
  const size_t n = size_t(rows) * size_t(columns), third = 3 * size_t(columns) * width(dtype);
  Buffer x(n * width(dtype)), codes(n * size_t(bits) / 8), scale(size_t(rows) * (bits == 8 ? 4 : 2));
  x.fill_values(random, dtype, 3);
  if (rows > 4) {  // a row of zeros, and one with a NaN
    memset(static_cast<uint8_t*>(x.data()) + size_t(columns) * width(dtype), 0, size_t(columns) * width(dtype));
    memset(static_cast<uint8_t*>(x.data()) + third, 0xFF, width(dtype));
  }
  hlm_weight w = {};
  w.values = x.data();
  w.codes = codes.data();
  w.scale = scale.data();
  w.rows = rows;
  w.columns = columns;
  w.key = 0x9E3779B97F4A7C15u;
  w.dtype = dtype;
  w.bits = uint8_t(bits);
  uint64_t hash = 0xCBF29CE484222325u;
  for (int action : {HLM_ENCODE, HLM_DECODE, HLM_RECODE}) {
    const bool can = action != HLM_RECODE || (bits == 8 && dtype == HLM_F32);
    if (can && action == HLM_RECODE) x.fill_values(random, dtype, 3);
    if ((hlm_weights(isa, action, &w, 1, 0, 1) == 0) != can) return 0;
    int64_t next = 1;  // what two threads would do one after the other
    for (int i = 0; i < 2; i++) {
      if ((hlm_weights_shared(isa, action, &w, 1, 2, 1000, &next) == 0) != can) return 0;
      if (!can) next = 1;
    }
    hash = scale.checksum(codes.checksum(hash));
    // What is read of a NaN differs between processors.
    if (rows > 4) memset(static_cast<uint8_t*>(x.data()) + third, 0, size_t(columns) * width(dtype));
    hash = x.checksum(hash);
  }
  return hash;
}

// Two steps of a weight that exists in 8 bits alone, a few rows at a time; the checksum of all that was written.
uint64_t run_codes(int isa, int bits, uint8_t grad, int rows, int columns) {
  Random random{uint64_t(rows * 1000003 + columns + bits)};
  const size_t n = size_t(rows) * size_t(columns);
  const int block = bits == 4 ? 128 : 256, blocks = (int(n) + block - 1) / block, each = 256;
  Buffer x(4 * n), codes(n), scale(4 * size_t(rows)), gradient(n * width(grad)), wide(4 * size_t(each * columns));
  const size_t moment = bits == 4 ? size_t(blocks) * 64 : n * size_t(bits / 8);
  Buffer m(moment), v(moment), m_scale(4 * size_t(blocks)), v_scale(4 * size_t(blocks));
  x.fill_values(random, HLM_F32, 3);
  gradient.fill_values(random, grad, 8);
  m.fill(random);
  v.fill(random);
  m_scale.fill_floats(random, true);
  v_scale.fill_floats(random, true);
  if (bits == 32) {
    m.fill_floats(random, false);
    v.fill_floats(random, true);
  }
  hlm_weight w = {};
  w.values = x.data();
  w.codes = codes.data();
  w.scale = scale.data();
  w.rows = rows;
  w.columns = columns;
  w.bits = 8;
  if (hlm_weights(isa, HLM_ENCODE, &w, 1, 0, 1000) != 0) return 0;
  w.values = nullptr;
  hlm_adam_tensor t = {};
  t.grad = gradient.data();
  t.m = m.data();
  t.v = v.data();
  t.m_scale = bits == 32 ? nullptr : static_cast<float*>(m_scale.data());
  t.v_scale = bits == 32 ? nullptr : static_cast<float*>(v_scale.data());
  t.n = int64_t(n);
  t.copy_dtype = HLM_NONE;
  t.grad_dtype = grad;
  t.bits = uint8_t(bits);
  set_constants(t, bits);
  for (int step = 0; step < 2; step++) {
    t.key = w.key = 0x9E3779B97F4A7C15u * uint64_t(step + 1);
    int64_t next = 0;
    if (hlm_adam_codes_shared(isa, &t, &w, each, static_cast<float*>(wide.data()), &next) < 0) return 0;
  }
  uint64_t hash = 0xCBF29CE484222325u;
  for (const Buffer* buffer : {&codes, &scale, &m, &v, &m_scale, &v_scale}) hash = buffer->checksum(hash);
  int64_t next = 0;  // what cannot be is refused
  if (hlm_adam_codes_shared(isa, &t, &w, 0, nullptr, &next) != -1) return 0;
  t.n++;
  return hlm_adam_codes_shared(isa, &t, &w, each, nullptr, &next) == -1 ? hash : 0;
}

int check_codes(const std::vector<int>& isas, int bits, uint8_t grad, int rows, int columns) {
  const uint64_t hash = run_codes(HLM_BASE, bits, grad, rows, columns);
  printf("%2d bits, codes of a weight, grad %-4s, %3d rows of %4d values: %016llx\n", bits, kGrads[grad], rows, columns,
         static_cast<unsigned long long>(hash));
  int failures = hash == 0 ? printf("  refused\n") > 0 : 0;
  for (int isa : isas) {
    if (run_codes(isa, bits, grad, rows, columns) != hash) failures += printf("  isa %d differs\n", isa) > 0;
  }
  return failures;
}

bool unknown_weights_are_refused(int isa) {
  Buffer buffer(4096);
  hlm_weight good = {};
  good.values = good.codes = good.scale = buffer.data();
  good.rows = 1;
  good.columns = 32;
  good.bits = 4;
  hlm_weight bad[4] = {good, good, good, good};
  bad[0].bits = 5;
  bad[1].dtype = 3;
  bad[2].columns = 64;
  bad[3].rows = -1;
  int64_t none = 0;
  for (const hlm_weight& w : bad) {
    const hlm_weight pair[2] = {good, w};
    if (hlm_weights(isa, HLM_ENCODE, pair, 2, 0, 1) != -1) return false;
  }
  if (hlm_weights_shared(isa, HLM_RECODE, &good, 1, 1, 1, &none) != -1) return false;
  return hlm_weights(isa, 3, &good, 1, 0, 1) == -1 && hlm_weights(HLM_ISA_COUNT, HLM_ENCODE, &good, 1, 0, 1) == -1;
}

// Prints the case's line; the number of failures.
int check_weight(const std::vector<int>& isas, int bits, uint8_t dtype, int rows, int columns) {
  const uint64_t hash = run_weight(HLM_BASE, bits, dtype, rows, columns);
  printf("%2d bits of a weight, %-4s, %2d rows of %5d values: %016llx\n", bits, kGrads[dtype], rows, columns,
         static_cast<unsigned long long>(hash));
  int failures = hash == 0 ? printf("  refused\n") > 0 : 0;
  for (int isa : isas) {
    if (run_weight(isa, bits, dtype, rows, columns) != hash) failures += printf("  isa %d differs\n", isa) > 0;
  }
  return failures;
}

}  // namespace

int main() {
  std::vector<int> isas;
  for (int isa = 0; isa < HLM_ISA_COUNT; isa++) {
    if (hlm_isa_supported(isa)) isas.push_back(isa);
  }
  fprintf(stderr, "ABI %d, instruction sets:", int(hlm_abi_version()));
  for (int isa : isas) fprintf(stderr, " %d", isa);
  fprintf(stderr, "\n");
  int failures = 0;
  for (int isa : isas) {
    if (!unknown_tensors_are_refused(isa)) failures += printf("  isa %d accepts an unknown tensor\n", isa) > 0;
    if (!any_over_is_right(isa)) failures += printf("  isa %d: wrong any_over\n", isa) > 0;
    if (!unknown_weights_are_refused(isa)) failures += printf("  isa %d accepts an unknown weight\n", isa) > 0;
    if (!triad_is_right(isa)) failures += printf("  isa %d: wrong triad\n", isa) > 0;
  }
  for (int bits : {4, 8, 32}) {
    for (const Types& types : kWeights) {
      for (int grad = HLM_F32; grad <= HLM_F16; grad++) {
        for (int n : kSizes) failures += check_case(isas, bits, types, uint8_t(grad), n);
      }
    }
  }
  for (int bits : {4, 8, 32}) {
    for (int grad = HLM_F32; grad <= HLM_F16; grad++) {
      failures += check_codes(isas, bits, uint8_t(grad), 300, 96);
      failures += check_codes(isas, bits, uint8_t(grad), 3, 100);
    }
  }
  for (int dtype = HLM_F32; dtype <= HLM_F16; dtype++) {
    for (const auto& shape : kShapes) {
      failures += check_weight(isas, 8, uint8_t(dtype), shape[0], shape[1]);
      if (shape[1] % 32 == 0) failures += check_weight(isas, 4, uint8_t(dtype), shape[0] * shape[1] / 32, 32);
    }
  }
  return failures ? 1 : 0;
}
