// write_kv cpu:avx512 bf16-d64-h9x3-b16-NHD-kvint8
#include <algorithm>
#include <cstring>

/* The C ABI between a generated kernel and whoever calls it (pagegen/kernel.py mirrors it with ctypes).
 *
 * Rules: plain C, no torch; strides count elements, sizes count bytes; `size` is the caller's sizeof, so that fields can
 * be appended later without breaking older libraries; a function returns 0 or one of PG_E_*, and never aborts.
 * A kernel allocates nothing and keeps no state: two threads may call it at once with different workspaces. */
#ifndef PAGEGEN_ABI_H
#define PAGEGEN_ABI_H
#include <stdint.h>

#define PAGEGEN_ABI_VERSION 1

enum {
  PG_OK = 0,
  PG_E_SIZE = 1,       /* the args struct is smaller than this library needs */
  PG_E_WORKSPACE = 2,  /* workspace_bytes is below what *_workspace() answered */
  PG_E_CU_SEQLENS = 3, /* cu_seqlens_q does not start at 0, decreases, or runs past num_tokens */
  PG_E_CONTEXT = 4,    /* a context length is negative or beyond the block table */
  PG_E_BLOCK_ID = 5,   /* a block id that is needed lies outside the cache */
  PG_E_SLOT = 6,       /* a slot is below -1 or outside the cache */
  PG_E_PREFIX = 7,     /* shared_prefix_len exceeds a context, or the tables do not begin alike */
  PG_E_POSITION = 8,   /* a position lies outside cos_sin */
  PG_E_SCALE = 9,      /* a scale of a whole tensor or head is not a positive, finite number */
  PG_E_MATRIX = 10,    /* the system does not let this process use the matrix unit */
};

typedef struct pg_attend_args {
  uint64_t size;
  const void* q;               /* [num_tokens, q_heads, head_dim] */
  void* out;                   /* [num_tokens, q_heads, head_dim_v] */
  float* lse;                  /* [num_tokens, q_heads], natural log; used only if the spec asks for it */
  const void* k_cache;
  const void* v_cache;
  const int32_t* block_table;  /* [num_seqs, table_width]; entries past the context are never read */
  const int32_t* context_lens; /* [num_seqs] keys of each sequence, this step's included */
  const int32_t* cu_seqlens_q; /* [num_seqs + 1] */
  void* workspace;             /* 64-byte aligned */
  uint64_t workspace_bytes;
  int64_t num_tokens, num_seqs, num_blocks, table_width;
  int64_t q_stride_token, q_stride_head;
  int64_t out_stride_token, out_stride_head;
  int64_t lse_stride_token, lse_stride_head;
  int64_t k_stride_block, k_stride_token, k_stride_head, k_stride_dim; /* dim: one step of head_dim / x */
  int64_t v_stride_block, v_stride_token, v_stride_head, v_stride_dim;
  int64_t block_table_stride;
  float scale;
  int32_t num_threads;
  const float *k_scale, *v_scale, *k_zero, *v_zero; /* of a quantised cache: (stored - zero) * scale */
  int64_t k_scale_stride_block, k_scale_stride_token, k_scale_stride_head; /* 0 where one scale serves all */
  int64_t v_scale_stride_block, v_scale_stride_token, v_scale_stride_head;
  const float* alibi_slopes;   /* [q_heads] */
  const float* sinks;          /* [q_heads] */
  const uint8_t* mask;         /* [num_tokens, mask_width]: column j is key context - mask_width + j */
  int64_t mask_stride_token, mask_width;
  int64_t shared_prefix_len;   /* tokens that all sequences share, a multiple of the block size; 0: none */
} pg_attend_args;

typedef struct pg_write_kv_args {
  uint64_t size;
  const void* k;               /* [num_tokens, kv_heads, head_dim] */
  const void* v;               /* [num_tokens, kv_heads, head_dim_v] */
  void* k_cache;
  void* v_cache;
  const int64_t* slot_mapping; /* [num_tokens]; -1 skips the token */
  int64_t num_tokens, num_blocks;
  int64_t src_k_stride_token, src_k_stride_head, src_v_stride_token, src_v_stride_head;
  int64_t k_stride_block, k_stride_token, k_stride_head, k_stride_dim;
  int64_t v_stride_block, v_stride_token, v_stride_head, v_stride_dim;
  int32_t num_threads, reserved;
  float *k_scale, *v_scale, *k_zero, *v_zero; /* of a quantised cache; a scale a token and head is written */
  int64_t k_scale_stride_block, k_scale_stride_token, k_scale_stride_head; /* 0 where one scale serves all */
  int64_t v_scale_stride_block, v_scale_stride_token, v_scale_stride_head;
  const void* q;               /* [num_tokens, q_heads, head_dim]; with rope */
  void* q_out;                 /* the same shape; may be q */
  const int64_t* positions;    /* [num_tokens] */
  const float* cos_sin;        /* [max_positions, rotary_dim]: cosines, then sines */
  const float *q_weight, *k_weight; /* [head_dim]; with q/k norm */
  int64_t q_stride_token, q_stride_head, q_out_stride_token, q_out_stride_head, cos_sin_stride, max_positions;
  float eps;
  int32_t reserved2;
} pg_write_kv_args;

typedef struct pg_copy_blocks_args {
  uint64_t size;
  void* k_cache;
  void* v_cache;
  const int64_t* pairs;        /* [num_pairs, 2] source and destination block; no block is both */
  int64_t num_pairs, num_blocks;
  int64_t k_stride_block, k_stride_token, k_stride_head, k_stride_dim;
  int64_t v_stride_block, v_stride_token, v_stride_head, v_stride_dim;
  int32_t num_threads, reserved;
  float *k_scale, *v_scale, *k_zero, *v_zero; /* of a quantised cache; a scale a token and head is copied too */
  int64_t k_scale_stride_block, k_scale_stride_token, k_scale_stride_head; /* 0 where one scale serves all */
  int64_t v_scale_stride_block, v_scale_stride_token, v_scale_stride_head;
} pg_copy_blocks_args;

/* gather_blocks copies blocks to rows, scatter_blocks rows to blocks. A row holds a block's K, its V unless that lies in
 * K, and if each token has scales k_scale, v_scale, k_zero, v_zero: each dense, in its own order of dimensions. */
typedef struct pg_stage_blocks_args {
  uint64_t size;
  void* k_cache;
  void* v_cache;
  const int64_t* blocks;       /* [num_rows] */
  void* staging;               /* [num_rows, bytes of a block] */
  int64_t num_rows, num_blocks, staging_stride; /* staging_stride counts bytes */
  int64_t k_stride_block, k_stride_token, k_stride_head, k_stride_dim;
  int64_t v_stride_block, v_stride_token, v_stride_head, v_stride_dim;
  int32_t num_threads, reserved;
  float *k_scale, *v_scale, *k_zero, *v_zero;
  int64_t k_scale_stride_block, k_scale_stride_token, k_scale_stride_head;
  int64_t v_scale_stride_block, v_scale_stride_token, v_scale_stride_head;
} pg_stage_blocks_args;

typedef pg_stage_blocks_args pg_gather_blocks_args, pg_scatter_blocks_args;

typedef struct pg_relayout_args {
  uint64_t size;
  void* k_cache;
  void* v_cache;
  const void* source_k;        /* the other cache */
  const void* source_v;
  const int64_t* slots;        /* [num_pairs, 2] source and destination slot; -1 skips the pair */
  int64_t num_pairs, num_blocks, source_num_blocks, source_block_size;
  int64_t source_x;            /* dims of the source's K that are packed side by side */
  int64_t k_stride_block, k_stride_token, k_stride_head, k_stride_dim;
  int64_t v_stride_block, v_stride_token, v_stride_head, v_stride_dim;
  int64_t source_k_stride_block, source_k_stride_token, source_k_stride_head, source_k_stride_dim;
  int64_t source_v_stride_block, source_v_stride_token, source_v_stride_head, source_v_stride_dim;
  int32_t num_threads, reserved;
  float *k_scale, *v_scale, *k_zero, *v_zero;
  int64_t k_scale_stride_block, k_scale_stride_token, k_scale_stride_head;
  int64_t v_scale_stride_block, v_scale_stride_token, v_scale_stride_head;
  const float *source_k_scale, *source_v_scale, *source_k_zero, *source_v_zero;
  int64_t source_k_scale_stride_block, source_k_scale_stride_token, source_k_scale_stride_head;
  int64_t source_v_scale_stride_block, source_v_scale_stride_token, source_v_scale_stride_head;
} pg_relayout_args;

#ifdef __cplusplus
#define PG_EXPORT extern "C" __attribute__((visibility("default")))
#else
#define PG_EXPORT extern
#endif

/* Which of these a library exports depends on its op. */
PG_EXPORT int32_t pagegen_abi_version(void);
PG_EXPORT int64_t pagegen_attend_workspace(const pg_attend_args* args);
PG_EXPORT int32_t pagegen_attend(const pg_attend_args* args);
PG_EXPORT int32_t pagegen_write_kv(const pg_write_kv_args* args);
PG_EXPORT int32_t pagegen_copy_blocks(const pg_copy_blocks_args* args);
PG_EXPORT int32_t pagegen_gather_blocks(const pg_gather_blocks_args* args);
PG_EXPORT int32_t pagegen_scatter_blocks(const pg_scatter_blocks_args* args);
PG_EXPORT int32_t pagegen_relayout(const pg_relayout_args* args);

#endif
// A kernel as a function of Python's on tensors: it reads where they lie through DLPack's exchange API, and compares all else
// that is known of them with what its caller (pagegen/abi.py) has checked. So a call costs hardly more than the kernel.
//
// What is used of Python is in its stable ABI and is found when a Python loads the library: no header of its is needed.
#include <algorithm>
#include <cstring>

#define PG_PYTHON extern "C" __attribute__((weak))
PG_PYTHON char _Py_NoneStruct[];
PG_PYTHON char* PyByteArray_AsString(void* object);
PG_PYTHON void* PyLong_FromLong(long value);
PG_PYTHON void PyErr_Clear(void);
PG_PYTHON void* PyEval_SaveThread(void);
PG_PYTHON void PyEval_RestoreThread(void* thread);

namespace python {
constexpr int MAX_TENSORS = 16, MAX_DIMS = 5;
constexpr int32_t OTHER_TENSORS = -1;  // beside PG_OK and PG_E_*: nothing has run, the call has to be checked

struct DLTensor {  // of DLPack 1
  void* data;
  int32_t device_type, device_id, dims;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};

struct Kind {  // what a tensor is like wherever it lies; zeros for None
  int64_t dtype, device, dims, in_previous, shape[MAX_DIMS], strides[MAX_DIMS];
};

enum State : int64_t { NEW, KNOWN, UNREADABLE };

struct Call {  // and behind it the args of the kernel
  int32_t (*dl_tensor)(void* object, DLTensor* tensor);  // DLPack's dltensor_from_py_object_no_sync; null if torch has none
  State state;
  int64_t count;                // of tensors; those at the end that a call leaves out are None
  int64_t fields[MAX_TENSORS];  // where in the args their addresses stand
  Kind kinds[MAX_TENSORS];
};

// Whether a tensor, or None, could be read. `address` is the previous tensor's before, its own after.
inline bool read(const Call& call, void* object, const char*& address, Kind& kind) {
  const char* previous = address;
  address = nullptr;
  kind = {};
  if (object == _Py_NoneStruct) return true;
  DLTensor tensor;
  if (!call.dl_tensor) return false;
  if (call.dl_tensor(object, &tensor)) return PyErr_Clear(), false;
  if (tensor.dims > MAX_DIMS) return false;
  if (!tensor.data && std::find(tensor.shape, tensor.shape + tensor.dims, 0) == tensor.shape + tensor.dims) return false;  // has lost its memory
  address = static_cast<char*>(tensor.data) + tensor.byte_offset;
  kind.dtype = tensor.code | tensor.bits << 8 | tensor.lanes << 16;
  kind.device = int64_t(tensor.device_type) << 32 | uint32_t(tensor.device_id);
  kind.dims = 1 + tensor.dims;
  kind.in_previous = address == previous;  // V that lies in K: it has to, whichever K it is
  std::copy_n(tensor.shape, tensor.dims, kind.shape);
  std::copy_n(tensor.strides, tensor.dims, kind.strides);
  return true;
}

// `self` is a bytearray with a Call and its args, which were packed for these very tensors. The first time the kernel runs on
// them and their kinds are kept; later it runs on any of the same kinds, which need no other check.
template <class Args>
void* call(void* self, void* const* tensors, intptr_t count, int32_t (*kernel)(const Args*)) {
  Call& c = *reinterpret_cast<Call*>(PyByteArray_AsString(self));
  char* args = reinterpret_cast<char*>(&c + 1);
  bool known = c.state != UNREADABLE && count <= c.count;
  const char* address = nullptr;
  for (intptr_t i = 0; known && i < c.count; ++i) {
    Kind kind;
    known = read(c, i < count ? tensors[i] : _Py_NoneStruct, address, kind);
    if (c.state == NEW) c.kinds[i] = kind;
    known = known && !std::memcmp(&kind, &c.kinds[i], sizeof kind);
    if (known) std::memcpy(args + c.fields[i], &address, sizeof address);
  }
  if (!known && c.state != NEW) return PyLong_FromLong(OTHER_TENSORS);
  c.state = known ? KNOWN : UNREADABLE;
  void* thread = PyEval_SaveThread();
  const int32_t status = kernel(reinterpret_cast<const Args*>(args));
  PyEval_RestoreThread(thread);
  return PyLong_FromLong(status);
}
}  // namespace python
// Element types of tensors, and their exact conversions one at a time. Every ISA file builds on these.
#include <cmath>
#include <cstdint>
#include <cstring>

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

static inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

[[maybe_unused]] static inline float widen(float value) { return value; }

[[maybe_unused]] static inline float widen(bf16 value) { return from_bits(uint32_t(value.bits) << 16); }

[[maybe_unused]] static inline float widen(fp16 value) {
  const uint32_t sign = uint32_t(value.bits & 0x8000) << 16;
  const uint32_t rest = value.bits & 0x7fff;
  if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);  // infinity, NaN
  if (rest < 0x400) return from_bits(sign | to_bits(float(rest) * 0x1p-24f));     // zero, subnormal
  return from_bits(sign | ((rest << 13) + (112u << 23)));
}

// Rounds to nearest, ties to even, as torch does.
[[maybe_unused]] static inline void narrow(float value, float* out) { *out = value; }

[[maybe_unused]] static inline void narrow(float value, bf16* out) {
  const uint32_t bits = to_bits(value);
  out->bits = std::isnan(value) ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

[[maybe_unused]] static inline void narrow(float value, fp16* out) {
  const uint32_t sign = to_bits(value) >> 16 & 0x8000;
  const float size = std::fabs(value);
  uint32_t bits;
  if (std::isnan(value)) {
    bits = 0x7e00;
  } else if (size >= 65520.0f) {  // halfway to the first value that is too large, and beyond
    bits = 0x7c00;
  } else if (size < 0x1p-14f) {  // subnormal: adding 0.5 aligns the last place at 2^-24 and lets the FPU round
    bits = to_bits(size + 0.5f) - to_bits(0.5f);
  } else {
    const uint32_t wide = to_bits(size);
    bits = (wide + 0xfff + (wide >> 13 & 1) - (112u << 23)) >> 13;
  }
  out->bits = uint16_t(sign | bits);
}

// 2^f on [-1/2, 1/2], exact at 0: minimax in float, degree 5; relative error 1.5e-7 with FMA, 1.8e-7 without.
static constexpr float EXP2_POLY[6] = {1.0f, 0x1.62e42ap-1f, 0x1.ebf9bcp-3f, 0x1.c6b716p-5f, 0x1.3cea88p-7f, 0x1.5bba14p-10f};
// 8-bit floats of a quantised KV cache, and their conversions one at a time. int8 is int8_t; int4 comes in pairs, uint8_t.
// Formats: Micikevicius et al. 2022 (https://arxiv.org/abs/2209.05433): e4m3 has no infinity, and one NaN a sign.
struct fp8_e4m3 {
  uint8_t bits;
};
struct fp8_e5m2 {
  uint8_t bits;
};

// Both fit into fp16: e5m2 is its upper byte, e4m3 has one exponent bit less, which leaves it 2^8 too small.
[[maybe_unused]] static inline float widen(fp8_e5m2 value) { return widen(fp16{uint16_t(value.bits << 8)}); }

[[maybe_unused]] static inline float widen(fp8_e4m3 value) {
  if ((value.bits & 0x7f) == 0x7f) return NAN;
  return 256.0f * widen(fp16{uint16_t((value.bits & 0x80) << 8 | (value.bits & 0x7f) << 7)});
}

[[maybe_unused]] static inline float widen(int8_t value) { return float(value); }

// Rounds to nearest, ties to even; beyond `most` it saturates. Written without branches, for loops to vectorise.
template <int MANTISSA, int BIAS>
static inline uint8_t narrow_8_bit(float value, float most) {
  constexpr int DROPPED = 23 - MANTISSA;
  constexpr float LAST_PLACE = float(uint32_t(1) << (24 - BIAS - MANTISSA));  // its ulp is the smallest subnormal
  const float size = std::fabs(value) < most ? std::fabs(value) : most;
  const uint32_t wide = to_bits(size);
  const uint32_t normal = (wide + (1u << (DROPPED - 1)) - 1 + (wide >> DROPPED & 1) - (uint32_t(127 - BIAS) << 23)) >> DROPPED;
  const uint32_t subnormal = to_bits(size + LAST_PLACE) - to_bits(LAST_PLACE);
  const uint32_t bits = size < 1.0f / float(uint32_t(1) << (BIAS - 1)) ? subnormal : normal;
  return uint8_t((value != value ? 0x7f : bits) | (to_bits(value) >> 24 & 0x80));
}

// The nearest whole number from low to high, of two the even one; for a NaN it is low.
[[maybe_unused]] static inline int whole(float value, float low, float high) {
  return int(std::nearbyint(value > low ? (value < high ? value : high) : low));
}

[[maybe_unused]] static inline void narrow(float value, int8_t* out) { *out = int8_t(whole(value, -128.0f, 127.0f)); }
[[maybe_unused]] static inline void narrow(float value, fp8_e4m3* out) { out->bits = narrow_8_bit<3, 7>(value, 448.0f); }
[[maybe_unused]] static inline void narrow(float value, fp8_e5m2* out) { out->bits = narrow_8_bit<2, 15>(value, 57344.0f); }
// AVX-512 F, BW, DQ, VL: 16 floats.
#include <immintrin.h>

namespace simd {
using V = __m512;
static constexpr int W = 16, REGISTERS = 32;
#define SIMD_INLINE [[maybe_unused]] static inline __attribute__((always_inline))

SIMD_INLINE V zero() { return _mm512_setzero_ps(); }
SIMD_INLINE V held(V v) {
  asm("" : "+v"(v));
  return v;
}
SIMD_INLINE V set1(float x) { return _mm512_set1_ps(x); }
SIMD_INLINE V add(V a, V b) { return _mm512_add_ps(a, b); }
SIMD_INLINE V mul(V a, V b) { return _mm512_mul_ps(a, b); }
SIMD_INLINE V max(V a, V b) { return _mm512_max_ps(a, b); }
SIMD_INLINE V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
SIMD_INLINE float sum(V v) { return _mm512_reduce_add_ps(v); }
SIMD_INLINE bool any_above(V v, float x) { return _mm512_cmp_ps_mask(v, set1(x), _CMP_GT_OQ) != 0; }
SIMD_INLINE float top(V v) { return _mm512_reduce_max_ps(v); }

SIMD_INLINE __mmask16 first(int n) { return __mmask16((1u << n) - 1); }
SIMD_INLINE V keep(V v, int n, float fill) { return _mm512_mask_mov_ps(set1(fill), first(n), v); }

SIMD_INLINE V widen_bf16(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }

SIMD_INLINE V load(const float* p) { return _mm512_loadu_ps(p); }
SIMD_INLINE V load(const bf16* p) { return widen_bf16(_mm256_loadu_si256((const __m256i*)p)); }
SIMD_INLINE V load(const fp16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

// To GCC a masked load is a whole one that is blended: if nobody reads the other lanes it may load them. Here somebody does.
template <class R>
SIMD_INLINE R masked(R loaded) {
  asm("" : "+v"(loaded));
  return loaded;
}
SIMD_INLINE __m256i halves(const void* p, int n) { return masked(_mm256_maskz_loadu_epi16(first(n), p)); }
SIMD_INLINE V load_n(const float* p, int n) { return masked(_mm512_maskz_loadu_ps(first(n), p)); }
SIMD_INLINE V load_n(const bf16* p, int n) { return widen_bf16(halves(p, n)); }
SIMD_INLINE V load_n(const fp16* p, int n) { return _mm512_cvtph_ps(halves(p, n)); }

SIMD_INLINE __m256i round_bf16(V v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i even = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(_mm512_srli_epi32(even, 16), nan, _mm512_set1_epi32(0x7fc0)));
}
SIMD_INLINE __m256i round_fp16(V v) { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

SIMD_INLINE void store(float* p, V v) { _mm512_storeu_ps(p, v); }
SIMD_INLINE void store(bf16* p, V v) { _mm256_storeu_si256((__m256i*)p, round_bf16(v)); }
SIMD_INLINE void store(fp16* p, V v) { _mm256_storeu_si256((__m256i*)p, round_fp16(v)); }
SIMD_INLINE void store_n(float* p, V v, int n) { _mm512_mask_storeu_ps(p, first(n), v); }
SIMD_INLINE void store_n(bf16* p, V v, int n) { _mm256_mask_storeu_epi16(p, first(n), round_bf16(v)); }
SIMD_INLINE void store_n(fp16* p, V v, int n) { _mm256_mask_storeu_epi16(p, first(n), round_fp16(v)); }

SIMD_INLINE __m512i load_words(const void* p, int n) {
  return n == W ? _mm512_loadu_si512(p) : masked(_mm512_maskz_loadu_epi32(first(n), p));
}
SIMD_INLINE void load_pairs(const bf16* p, int n, V& even, V& odd) {
  const __m512i both = load_words(p, n);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000))));
}
SIMD_INLINE void load_pairs(const fp16* p, int n, V& even, V& odd) {
  const __m512i both = load_words(p, n);
  even = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(both));
  odd = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16)));
}

SIMD_INLINE __m128i bytes(const void* p, int n) {
  return n == W ? _mm_loadu_si128((const __m128i*)p) : masked(_mm_maskz_loadu_epi8(first(n), p));
}
SIMD_INLINE V load_n(const int8_t* p, int n) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes(p, n))); }
SIMD_INLINE V load_n(const fp8_e5m2* p, int n) {
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes(p, n)), 8));
}
SIMD_INLINE V load_n(const fp8_e4m3* p, int n) {
  const __m128i code = bytes(p, n);
  const __mmask16 number = _mm_cmpneq_epu8_mask(_mm_or_si128(code, _mm_set1_epi8(-128)), _mm_set1_epi8(-1));
  const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(code), 7);  // the sign comes with it, twice
  const V small = _mm512_cvtph_ps(_mm256_and_si256(moved, _mm256_set1_epi16(short(0xbfff))));
  return _mm512_mask_mul_ps(set1(NAN), number, small, set1(256.0f));
}
SIMD_INLINE V load(const int8_t* p) { return load_n(p, W); }
SIMD_INLINE V load(const fp8_e4m3* p) { return load_n(p, W); }
SIMD_INLINE V load(const fp8_e5m2* p) { return load_n(p, W); }
SIMD_INLINE void load_nibbles(const uint8_t* p, int n, V& low, V& high) {
  const __m512i both = _mm512_cvtepu8_epi32(bytes(p, n));
  low = _mm512_cvtepi32_ps(_mm512_and_si512(both, _mm512_set1_epi32(15)));
  high = _mm512_cvtepi32_ps(_mm512_srli_epi32(both, 4));
}

SIMD_INLINE float top_size(const float* p, int n) {
  __m512i most = _mm512_setzero_si512();
  for (int i = 0; i < n; i += W) {
    const __m512i word = _mm512_castps_si512(n - i < W ? load_n(p + i, n - i) : load(p + i));
    most = _mm512_max_epu32(most, _mm512_and_si512(word, _mm512_set1_epi32(0x7fffffff)));
  }
  return from_bits(_mm512_reduce_max_epu32(most));
}
template <class T>
SIMD_INLINE float top_size(const T* p, int n) {
  __m256i most = _mm256_setzero_si256();
  for (int i = 0; i < n; i += W) {
    const __m256i half = n - i < W ? halves(p + i, n - i) : _mm256_loadu_si256((const __m256i*)(p + i));
    most = _mm256_max_epu16(most, _mm256_and_si256(half, _mm256_set1_epi16(0x7fff)));
  }
  const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  return widen(T{uint16_t(~_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)))))});
}

SIMD_INLINE void store_bytes(void* p, __m128i v, int n) {
  if (n < W) _mm_mask_storeu_epi8(p, first(n), v);
  else _mm_storeu_si128((__m128i*)p, v);
}
// Where one is a NaN, min and max give the second; converted, it is the least integer.
SIMD_INLINE __m128i round_to(int8_t, V v) { return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_min_ps(set1(127.0f), v))); }
SIMD_INLINE __m512i round_to_nibble(V v) { return _mm512_cvtps_epi32(_mm512_min_ps(_mm512_max_ps(v, zero()), set1(15.0f))); }
// To a number are added 2^23 of its last places: that rounds it, and the sum ends in the number of them that it has.
template <int MANTISSA, int BIAS>
SIMD_INLINE __m128i round_to_float(V v, float most) {
  constexpr int DROPPED = 23 - MANTISSA, LEAST = 128 - BIAS;  // the exponent of the least normal number
  const __m512i word = _mm512_castps_si512(v);
  const V size = _mm512_range_ps(v, set1(most), 0xa);  // the smaller magnitude
  const __m512i exponent = _mm512_and_si512(_mm512_castps_si512(size), _mm512_set1_epi32(0x7f800000));
  const __m512i above = _mm512_subs_epu16(exponent, _mm512_set1_epi32(LEAST << 23));
  const V places = _mm512_castsi512_ps(_mm512_add_epi32(above, _mm512_set1_epi32((LEAST + DROPPED) << 23)));
  const __m512i code = _mm512_add_epi32(_mm512_castps_si512(add(size, places)), _mm512_srli_epi32(above, DROPPED));
  const __m512i both = _mm512_mask_mov_epi32(code, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7f));
  return _mm512_cvtepi32_epi8(_mm512_ternarylogic_epi32(_mm512_set1_epi32(0x7f), both, _mm512_srli_epi32(word, 24), 0xca));
}
SIMD_INLINE __m128i round_to(fp8_e4m3, V v) { return round_to_float<3, 7>(v, 448.0f); }
SIMD_INLINE __m128i round_to(fp8_e5m2, V v) { return round_to_float<2, 15>(v, 57344.0f); }
template <class T>
SIMD_INLINE void store_n(T* p, V v, int n) { store_bytes(p, round_to(T{}, v), n); }
template <class T>
SIMD_INLINE void store(T* p, V v) { store_n(p, v, W); }
SIMD_INLINE void store_nibbles(uint8_t* p, V low, V high, int n) {
  store_bytes(p, _mm512_cvtepi32_epi8(_mm512_or_si512(round_to_nibble(low), _mm512_slli_epi32(round_to_nibble(high), 4))), n);
}

// Each 128-bit lane ends up with that lane's share of the four sums.
SIMD_INLINE V sum4(V a, V b, V c, V d) {
  const V ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const V cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  return add(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
SIMD_INLINE V join(const V* parts) {
  const V low = add(_mm512_shuffle_f32x4(parts[0], parts[1], 0x44), _mm512_shuffle_f32x4(parts[0], parts[1], 0xee));
  const V high = add(_mm512_shuffle_f32x4(parts[2], parts[3], 0x44), _mm512_shuffle_f32x4(parts[2], parts[3], 0xee));
  return add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
}

// In place: lane j of rows[i] becomes lane i of rows[j].
SIMD_INLINE void transpose(V* rows) {
  V pairs[16], quads[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      const __m512d x = _mm512_castps_pd(pairs[i + j]), y = _mm512_castps_pd(pairs[i + j + 2]);
      quads[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
      quads[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
    }
  }
  for (int j = 0; j < 4; ++j) {
    const V a = _mm512_shuffle_f32x4(quads[j], quads[j + 4], 0x88), b = _mm512_shuffle_f32x4(quads[j], quads[j + 4], 0xdd);
    const V c = _mm512_shuffle_f32x4(quads[j + 8], quads[j + 12], 0x88), d = _mm512_shuffle_f32x4(quads[j + 8], quads[j + 12], 0xdd);
    rows[j] = _mm512_shuffle_f32x4(a, c, 0x88);
    rows[j + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
    rows[j + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
    rows[j + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
  }
}

SIMD_INLINE V exp2(V x) {
  x = max(set1(-200.0f), x);  // below the smallest float, for scalef; in this order a NaN stays one
  const V whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const V f = _mm512_sub_ps(x, whole);
  V y = set1(EXP2_POLY[5]);
  for (int i = 4; i >= 0; --i) y = fma(y, f, set1(EXP2_POLY[i]));
  return _mm512_scalef_ps(y, whole);
}
}  // namespace simd

namespace {
using namespace simd;

using T = bf16;  // q, k, v
using C = int8_t;  // cache
constexpr int KV_HEADS = 3, D = 64, DV = 64, BLOCK = 16;

// --- quantisation, bit for bit as `quantise` in pagegen/reference.py has it, of a row of T or of fp32 ------------------

// A scale that is 0, subnormal or NaN has no use as a divisor: what is divided by it becomes 0.
inline float inverse(float scale) { return scale >= 0x1p-126f ? 1.0f / scale : 0.0f; }

template <class From>
inline V load_some(const From* from, int n) {
  return n < W ? load_n(from, n) : load(from);
}

// The scale with which a row fills the type.
template <int N, class From>
inline float scale_of(const From* row) {
  return top_size(row, N) / 127.0f;
}

// N numbers to N stored ones.
template <int N, class From>
inline void quantise(C* to, const From* row, float scale) {
  const float factor = inverse(scale);
  const auto step = [&](int d, int n) { return mul(load_some(row + d, n), set1(factor)); };
  for (int d = 0; d < N; d += W) {
    const int n = std::min(N - d, W);
    store_n(to + d, step(d, n), n);
  }
}

// --- tokens -----------------------------------------------------------------------------------------------------------

// K and V of a token.
inline void write(const pg_write_kv_args& a, int64_t t) {
  const T* k = static_cast<const T*>(a.k);
  C* k_cache = static_cast<C*>(a.k_cache);
  const T* v = static_cast<const T*>(a.v);
  C* v_cache = static_cast<C*>(a.v_cache);
  const int64_t block = a.slot_mapping[t] / BLOCK, in_block = a.slot_mapping[t] % BLOCK;
  // First all scales: each is long in the making, but they do not wait for each other.
  for (int64_t h = 0; h < KV_HEADS; ++h) {
    a.k_scale[block * a.k_scale_stride_block + in_block * a.k_scale_stride_token + h * a.k_scale_stride_head] = scale_of<D>(k + t * a.src_k_stride_token + h * a.src_k_stride_head);
    a.v_scale[block * a.v_scale_stride_block + in_block * a.v_scale_stride_token + h * a.v_scale_stride_head] = scale_of<DV>(v + t * a.src_v_stride_token + h * a.src_v_stride_head);
  }
  for (int64_t h = 0; h < KV_HEADS; ++h) {
    quantise<D>(k_cache + block * a.k_stride_block + in_block * a.k_stride_token + h * a.k_stride_head, k + t * a.src_k_stride_token + h * a.src_k_stride_head, a.k_scale[block * a.k_scale_stride_block + in_block * a.k_scale_stride_token + h * a.k_scale_stride_head]);
    quantise<DV>(v_cache + block * a.v_stride_block + in_block * a.v_stride_token + h * a.v_stride_head, v + t * a.src_v_stride_token + h * a.src_v_stride_head, a.v_scale[block * a.v_scale_stride_block + in_block * a.v_scale_stride_token + h * a.v_scale_stride_head]);
  }
}
}  // namespace

PG_EXPORT int32_t pagegen_abi_version(void) { return PAGEGEN_ABI_VERSION; }

PG_EXPORT int32_t pagegen_write_kv(const pg_write_kv_args* args) {
  const pg_write_kv_args& a = *args;
  if (a.size < sizeof(pg_write_kv_args)) return PG_E_SIZE;
  for (int64_t t = 0; t < a.num_tokens; ++t) {
    if (a.slot_mapping[t] < -1 || a.slot_mapping[t] >= a.num_blocks * BLOCK) return PG_E_SLOT;
  }
  // Below a few tokens a thread, waking the others costs more than the work.
  const int threads = int(std::clamp<int64_t>(a.num_tokens / 4, 1, std::max(1, a.num_threads)));
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < a.num_tokens; ++t) {
    if (a.slot_mapping[t] >= 0) write(a, t);
  }
  return PG_OK;
}

PG_EXPORT void* pagegen_write_kv_call(void* self, void* const* tensors, intptr_t count) {
  return python::call(self, tensors, count, pagegen_write_kv);
}
