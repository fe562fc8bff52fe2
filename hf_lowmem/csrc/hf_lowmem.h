// The C ABI of hf_lowmem's core: pure functions on memory that the caller owns.
// No threads, no allocation, no state, no I/O. Any number of threads may call at once on disjoint units.
#pragma once

#include <stdint.h>

#if defined(_WIN32)
#define HLM_API __declspec(dllexport)
#else
#define HLM_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Raised whenever a struct, a function or the bits that one computes change; native.py refuses another number.
#define HLM_ABI_VERSION 9

// A unit of work: this many consecutive values of one tensor (the last unit of a tensor may be shorter).
#define HLM_UNIT 256

enum hlm_dtype { HLM_F32 = 0, HLM_BF16 = 1, HLM_F16 = 2, HLM_NONE = 255 };

// In order of priority: the last supported one is the best.
enum hlm_isa { HLM_BASE = 0, HLM_AVX2 = 1, HLM_AVX512 = 2, HLM_NEON = 3, HLM_ISA_COUNT = 4 };

// One tensor of an AdamW step; kernels/adam.py says what each buffer holds. No alignment beyond that of
// its elements is asked for.
typedef struct hlm_adam_tensor {
  void* weight;       // n values of weight_dtype
  int8_t* extension;  // n bytes of a 24-bit master, or NULL
  void* copy;         // n values of copy_dtype (BF16 or F16), or NULL; only with an F32 weight
  const void* grad;   // n values of grad_dtype
  void* m;            // codes, or n floats where bits == 32
  void* v;
  float* m_scale;  // one a block, or NULL where bits == 32
  float* v_scale;
  int64_t n;
  int64_t start;  // number of the first value within the whole parameter, a multiple of HLM_UNIT
  uint64_t key;   // of the random bits
  float c_m, b_m, c_h, b_v, root_correction, eps, step_size, decay;
  uint32_t grad_limit;  // magnitude bits in grad_dtype
  uint8_t weight_dtype, copy_dtype, grad_dtype, bits;
} hlm_adam_tensor;

enum hlm_weight_action { HLM_ENCODE = 0, HLM_DECODE = 1, HLM_RECODE = 2 };

// One weight in few bits; kernels/weights.py says what its buffers hold.
typedef struct hlm_weight {
  void* values;  // rows * columns values of dtype, which decoding writes and everything else reads; recoding takes F32
  void* codes;   // rows * columns of `bits` bits
  void* scale;   // one a row: floats, or bf16 words where bits == 4
  int64_t rows;  // of values that share a scale
  int64_t columns;  // 32 where bits == 4
  uint64_t key;     // of the random bits with which a weight is recoded
  uint8_t dtype, bits;
} hlm_weight;

// Values that a unit of work on weights holds, in whole rows, or a row that is longer (hlm_weights).
#define HLM_WEIGHT_UNIT 16384

HLM_API int32_t hlm_abi_version(void);

// Whether this build holds the ISA's code and this machine can run it.
HLM_API int32_t hlm_isa_supported(int32_t isa);

// Steps the units [first, last), counted through all `count` tensors in order. Returns the number of blocks left as
// they were for their gradients, or -1 where isa or a tensor's bits or dtypes are none that this build knows (nothing
// is written then).
HLM_API int64_t hlm_adam(int32_t isa, const hlm_adam_tensor* tensors, int64_t count, int64_t first, int64_t last);

// The same for one of several threads that share the units [*next, end): it takes `piece` of them at a time by adding
// to *next, which the caller keeps for all of the threads, until none is left. Whoever writes `end` there stops them
// all.
HLM_API int64_t hlm_adam_shared(int32_t isa, const hlm_adam_tensor* tensors, int64_t count, int64_t piece, int64_t end,
                                int64_t* next);

// Encodes, decodes or recodes the units [first, last), counted through all `count` weights in order; a weight of `rows`
// rows has ceil(rows / max(1, HLM_WEIGHT_UNIT / columns)) of them. Returns 0, or -1 where isa, action or a weight's
// bits or dtype are none that this build knows (nothing is written then).
HLM_API int32_t hlm_weights(int32_t isa, int32_t action, const hlm_weight* weights, int64_t count, int64_t first,
                            int64_t last);

// The same for one of several threads: see hlm_adam_shared.
HLM_API int32_t hlm_weights_shared(int32_t isa, int32_t action, const hlm_weight* weights, int64_t count, int64_t piece,
                                   int64_t end, int64_t* next);

// Steps a weight that exists in 8 bits alone, as one of several threads that share its rows [*next, rows): it takes
// `each` of them at a time, decodes them to `wide`, steps them and recodes them. Of the tensor n is that of the weight,
// weight is not read, and weight_dtype is F32; of the weight values is not read, and dtype is F32. `wide` is this
// thread's alone, each * columns floats, a multiple of HLM_UNIT. Returns what hlm_adam returns.
HLM_API int64_t hlm_adam_codes_shared(int32_t isa, const hlm_adam_tensor* tensor, const hlm_weight* weight,
                                      int64_t each, float* wide, int64_t* next);

// Whether any of n values of dtype (F32, BF16 or F16) has magnitude bits over `limit`; -1 where isa or dtype are
// unknown.
HLM_API int32_t hlm_any_over(int32_t isa, int32_t dtype, const void* x, int64_t n, uint32_t limit);

// Streaming-store triad a[i] = b[i] + s * c[i] over n floats, for measuring a machine's memory. Falls back to ordinary
// stores where the ISA has no streaming ones.
HLM_API void hlm_triad(int32_t isa, float* a, const float* b, const float* c, float s, int64_t n);

#ifdef __cplusplus
}
#endif
