// The C functions: what the machine can run, the floating-point environment, and the walk over the tensors.

#include <atomic>

#include "common.h"

#if HLM_X86
#include <immintrin.h>
#if defined(_MSC_VER) && !defined(__clang__)
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#else
#include <fenv.h>
#endif

namespace {

#if HLM_X86
struct CpuId {
  uint32_t eax, ebx, ecx, edx;
};

CpuId cpuid(uint32_t leaf) {
  CpuId out = {};
#if defined(_MSC_VER) && !defined(__clang__)
  int r[4];
  __cpuid(r, 0);
  if (uint32_t(r[0]) < leaf) return out;
  __cpuidex(r, int(leaf), 0);
  out = {uint32_t(r[0]), uint32_t(r[1]), uint32_t(r[2]), uint32_t(r[3])};
#else
  __get_cpuid_count(leaf, 0, &out.eax, &out.ebx, &out.ecx, &out.edx);
#endif
  return out;
}

// Which registers the operating system saves on a task switch.
uint64_t saved_registers() {
#if defined(_MSC_VER) && !defined(__clang__)
  return _xgetbv(0);
#else
  uint32_t low, high;  // by its bytes: the intrinsic would need a flag that this file must do without
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
#endif
}

bool detect(int32_t isa) {
  if (isa == HLM_BASE) return true;
  constexpr uint32_t kFma = 1u << 12, kOsxsave = 1u << 27, kAvx = 1u << 28;
  constexpr uint32_t kAvx2 = 1u << 5, kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  constexpr uint64_t kYmm = 0x06, kZmm = 0xE6;
  const uint32_t needed = kFma | kOsxsave | kAvx;
  if ((cpuid(1).ecx & needed) != needed) return false;
  const uint32_t features = cpuid(7).ebx;
  const uint64_t saved = saved_registers();
  const bool avx2 = (features & kAvx2) != 0 && (saved & kYmm) == kYmm;
  return avx2 && (isa == HLM_AVX2 || ((features & kAvx512) == kAvx512 && (saved & kZmm) == kZmm));
}
#else
bool detect(int32_t) {
  return true;  // NEON is part of the architecture
}
#endif

// Asked for on every call, and dear where a hypervisor has to answer: found out once. Threads that race for it all find
// the same.
bool machine_has(int32_t isa) {
  static std::atomic<uint32_t> known{0};  // a bit that says "asked", and one for each instruction set
  constexpr uint32_t kAsked = 1u << 31;
  uint32_t found = known.load(std::memory_order_relaxed);
  if (!found) {
    found = kAsked;
    for (int32_t i = 0; i < HLM_ISA_COUNT; i++) found |= detect(i) ? 1u << i : 0;
    known.store(found, std::memory_order_relaxed);
  }
  return (found >> isa & 1) != 0;
}

const hlm::Kernels* kernels_of(int32_t isa) {
  switch (isa) {
    case HLM_BASE:
      return &hlm::kBase;
#if HLM_X86
    case HLM_AVX2:
      return &hlm::kAvx2;
    case HLM_AVX512:
      return &hlm::kAvx512;
#elif HLM_ARM
    case HLM_NEON:
      return &hlm::kNeon;
#endif
    default:
      return nullptr;
  }
}

// Rounding to nearest with subnormals kept, whatever the calling thread has set: the bits depend on it.
class DefaultFloatEnvironment {
 public:
#if HLM_X86
  DefaultFloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~DefaultFloatEnvironment() { _mm_setcsr(saved_); }

 private:
  const unsigned saved_;
#else
  DefaultFloatEnvironment() {
    fegetenv(&saved_);
    fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { fesetenv(&saved_); }

 private:
  fenv_t saved_;
#endif
};

// Adds to a number that threads share, and returns what it was.
int64_t take(int64_t* shared, int64_t amount) {
#if defined(_MSC_VER) && !defined(__clang__)
  return _InterlockedExchangeAdd64(shared, amount);
#else
  return __atomic_fetch_add(shared, amount, __ATOMIC_RELAXED);
#endif
}

bool is_known(const hlm_adam_tensor& t) {
  const bool bits = t.bits == 4 || t.bits == 8 || t.bits == 32;
  const bool types = t.weight_dtype <= HLM_F16 && t.grad_dtype <= HLM_F16;
  const bool copy = !t.copy || (t.weight_dtype == HLM_F32 && (t.copy_dtype == HLM_BF16 || t.copy_dtype == HLM_F16));
  const bool extension = !t.extension || t.weight_dtype != HLM_F32;
  const bool scales = t.bits == 32 || t.n == 0 || (t.m_scale && t.v_scale);
  return bits && types && copy && extension && scales && t.n >= 0 && t.start >= 0 && t.start % HLM_UNIT == 0;
}

bool is_known(int32_t action, const hlm_weight& w) {
  const bool bits = w.bits == 8 || (w.bits == 4 && w.columns == 32 && action != HLM_RECODE);
  const bool type = w.dtype <= HLM_F16 && (action != HLM_RECODE || w.dtype == HLM_F32);
  return bits && type && w.rows >= 0 && w.columns > 0;
}

// The rows [first, last) of a weight and of the step of it, by themselves.
hlm_weight rows_of(const hlm_weight& w, int64_t first, int64_t last, float* wide) {
  constexpr uint32_t kLane = 0x9E3779B9u;  // a value's lane of random bits is its number times this, and the key
  hlm_weight part = w;
  part.values = wide;
  part.codes = static_cast<int8_t*>(w.codes) + first * w.columns;
  part.scale = static_cast<float*>(w.scale) + first;
  part.rows = last - first;
  const uint32_t low = uint32_t(w.key) + uint32_t(first * w.columns) * kLane;
  part.key = (w.key >> 32 << 32) | low;
  return part;
}

hlm_adam_tensor values_of(const hlm_adam_tensor& t, int64_t first, int64_t n, float* wide) {
  const int64_t block = hlm::block_size(t.bits), width = t.grad_dtype == HLM_F32 ? 4 : 2;
  hlm_adam_tensor part = t;
  part.weight = wide;
  part.grad = static_cast<const uint8_t*>(t.grad) + first * width;
  part.m = static_cast<uint8_t*>(t.m) + first * t.bits / 8;
  part.v = static_cast<uint8_t*>(t.v) + first * t.bits / 8;
  if (t.m_scale) part.m_scale = t.m_scale + first / block;
  if (t.v_scale) part.v_scale = t.v_scale + first / block;
  part.n = n;
  part.start = t.start + first;
  return part;
}

}  // namespace

extern "C" {

int32_t hlm_abi_version(void) {
  return HLM_ABI_VERSION;
}

int32_t hlm_isa_supported(int32_t isa) {
  return kernels_of(isa) != nullptr && machine_has(isa);
}

int64_t hlm_adam(int32_t isa, const hlm_adam_tensor* tensors, int64_t count, int64_t first, int64_t last) {
  if (!hlm_isa_supported(isa)) return -1;
  for (int64_t i = 0; i < count; i++) {
    if (!is_known(tensors[i])) return -1;
  }
  const DefaultFloatEnvironment environment;
  int64_t skipped = 0, begin = 0;  // begin: the tensor's first unit
  for (int64_t i = 0; i < count && begin < last; i++) {
    const hlm_adam_tensor& t = tensors[i];
    const int64_t units = (t.n + HLM_UNIT - 1) / HLM_UNIT;
    const int64_t from = first > begin ? first - begin : 0, to = last - begin < units ? last - begin : units;
    if (from < to) {
      const int block = hlm::block_size(t.bits);
      const int64_t blocks = (t.n + block - 1) / block, each = HLM_UNIT / block;
      skipped += kernels_of(isa)->blocks(t, from * each, to * each < blocks ? to * each : blocks);
    }
    begin += units;
  }
  return skipped;
}

int64_t hlm_adam_shared(int32_t isa, const hlm_adam_tensor* tensors, int64_t count, int64_t piece, int64_t end,
                        int64_t* next) {
  int64_t skipped = 0;
  for (int64_t first = take(next, piece); first < end; first = take(next, piece)) {
    const int64_t more = hlm_adam(isa, tensors, count, first, first + piece < end ? first + piece : end);
    if (more < 0) return more;
    skipped += more;
  }
  return skipped;
}

int32_t hlm_weights(int32_t isa, int32_t action, const hlm_weight* weights, int64_t count, int64_t first,
                    int64_t last) {
  if (!hlm_isa_supported(isa) || action < HLM_ENCODE || action > HLM_RECODE) return -1;
  for (int64_t i = 0; i < count; i++) {
    if (!is_known(action, weights[i])) return -1;
  }
  const DefaultFloatEnvironment environment;
  int64_t begin = 0;  // the weight's first unit
  for (int64_t i = 0; i < count && begin < last; i++) {
    const hlm_weight& w = weights[i];
    const int64_t each = w.columns < HLM_WEIGHT_UNIT ? HLM_WEIGHT_UNIT / w.columns : 1;
    const int64_t units = (w.rows + each - 1) / each;
    const int64_t from = first > begin ? first - begin : 0, to = last - begin < units ? last - begin : units;
    if (from < to) kernels_of(isa)->weights(action, w, from * each, to * each < w.rows ? to * each : w.rows);
    begin += units;
  }
  return 0;
}

int32_t hlm_weights_shared(int32_t isa, int32_t action, const hlm_weight* weights, int64_t count, int64_t piece,
                           int64_t end, int64_t* next) {
  for (int64_t first = take(next, piece); first < end; first = take(next, piece)) {
    const int64_t last = first + piece < end ? first + piece : end;
    if (hlm_weights(isa, action, weights, count, first, last) < 0) return -1;
  }
  return 0;
}

int64_t hlm_adam_codes_shared(int32_t isa, const hlm_adam_tensor* tensor, const hlm_weight* weight, int64_t each,
                              float* wide, int64_t* next) {
  const hlm_adam_tensor& t = *tensor;
  const hlm_weight& w = *weight;
  if (!hlm_isa_supported(isa) || !is_known(t) || !is_known(HLM_RECODE, w)) return -1;
  if (t.weight_dtype != HLM_F32 || t.copy || w.bits != 8 || t.n != w.rows * w.columns) return -1;
  if (each <= 0 || each * w.columns % HLM_UNIT != 0) return -1;
  const DefaultFloatEnvironment environment;
  const hlm::Kernels& kernels = *kernels_of(isa);
  const int64_t block = hlm::block_size(t.bits);
  int64_t skipped = 0;
  for (int64_t first = take(next, each); first < w.rows; first = take(next, each)) {
    const int64_t last = first + each < w.rows ? first + each : w.rows, n = (last - first) * w.columns;
    const hlm_weight rows = rows_of(w, first, last, wide);
    kernels.weights(HLM_DECODE, rows, 0, rows.rows);
    skipped += kernels.blocks(values_of(t, first * w.columns, n, wide), 0, (n + block - 1) / block);
    kernels.weights(HLM_RECODE, rows, 0, rows.rows);
  }
  return skipped;
}

int32_t hlm_any_over(int32_t isa, int32_t dtype, const void* x, int64_t n, uint32_t limit) {
  if (!hlm_isa_supported(isa) || dtype < HLM_F32 || dtype > HLM_F16) return -1;
  return kernels_of(isa)->any_over(x, dtype == HLM_F32, n, limit);
}

void hlm_triad(int32_t isa, float* a, const float* b, const float* c, float s, int64_t n) {
  if (hlm_isa_supported(isa)) kernels_of(isa)->triad(a, b, c, s, n);
}

}  // extern "C"
