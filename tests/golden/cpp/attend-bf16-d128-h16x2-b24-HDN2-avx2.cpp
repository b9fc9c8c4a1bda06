// attend cpu:avx2 bf16-d128-h16x2-b24-HDN2
// tile_kv=64 tile_q=16 split_kv=1024 tile_few=64 row_block=4 row_block_packed=6 pack_rows=16 prefetch=1 prefetch_again=6
//
// A row is one query token of one query head. A work item is a tile of rows of one sequence that share a KV head,
// and a range of that sequence's tokens: in decode the range is cut into parts of SPLIT_KV tokens, always at the same
// places, so that a result does not depend on the batch; in prefill the rows are cut into tiles of TILE_Q tokens.
// Each item runs an online softmax (Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867) over tiles of TILE_KV
// tokens; parts of one row are merged by their maxima and sums at the end. Where all sequences begin alike, parts of that
// prefix are items of their own, with rows of many sequences (cascade, as in Juravsky et al. 2024,
// https://arxiv.org/abs/2402.05099).
#include <algorithm>
#include <type_traits>

#include <omp.h>

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
// AVX2 with FMA and F16C: 8 floats.
#include <immintrin.h>

namespace simd {
using V = __m256;
static constexpr int W = 8, REGISTERS = 16;
#define SIMD_INLINE [[maybe_unused]] static inline __attribute__((always_inline))

SIMD_INLINE V zero() { return _mm256_setzero_ps(); }
SIMD_INLINE V held(V v) {
  asm("" : "+x"(v));
  return v;
}
SIMD_INLINE V set1(float x) { return _mm256_set1_ps(x); }
SIMD_INLINE V add(V a, V b) { return _mm256_add_ps(a, b); }
SIMD_INLINE V mul(V a, V b) { return _mm256_mul_ps(a, b); }
SIMD_INLINE V max(V a, V b) { return _mm256_max_ps(a, b); }
SIMD_INLINE V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
SIMD_INLINE float sum(V v) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 quarter = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}
SIMD_INLINE bool any_above(V v, float x) { return _mm256_movemask_ps(_mm256_cmp_ps(v, set1(x), _CMP_GT_OQ)) != 0; }
SIMD_INLINE float top(V v) {
  const __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 quarter = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(quarter, _mm_movehdup_ps(quarter)));
}

SIMD_INLINE __m256i first(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
SIMD_INLINE V keep(V v, int n, float fill) { return _mm256_blendv_ps(set1(fill), v, _mm256_castsi256_ps(first(n))); }

SIMD_INLINE V widen_bf16(__m128i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16)); }

// There is no masked 16-bit load or store: a short copy through the stack keeps to the bytes that are ours.
SIMD_INLINE __m128i load_halves(const void* p, int n) {
  alignas(16) uint16_t copy[8] = {};
  std::memcpy(copy, p, size_t(n) * 2);
  return _mm_load_si128((const __m128i*)copy);
}
SIMD_INLINE void store_halves(void* p, __m128i v, int n) {
  alignas(16) uint16_t copy[8];
  _mm_store_si128((__m128i*)copy, v);
  std::memcpy(p, copy, size_t(n) * 2);
}

SIMD_INLINE V load(const float* p) { return _mm256_loadu_ps(p); }
SIMD_INLINE V load(const bf16* p) { return widen_bf16(_mm_loadu_si128((const __m128i*)p)); }
SIMD_INLINE V load(const fp16* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
SIMD_INLINE V load_n(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
SIMD_INLINE V load_n(const bf16* p, int n) { return widen_bf16(load_halves(p, n)); }
SIMD_INLINE V load_n(const fp16* p, int n) { return _mm256_cvtph_ps(load_halves(p, n)); }

SIMD_INLINE __m128i round_bf16(V v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i even = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i wide = _mm256_blendv_epi8(_mm256_srli_epi32(even, 16), _mm256_set1_epi32(0x7fc0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
}
SIMD_INLINE __m128i round_fp16(V v) { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

SIMD_INLINE void store(float* p, V v) { _mm256_storeu_ps(p, v); }
SIMD_INLINE void store(bf16* p, V v) { _mm_storeu_si128((__m128i*)p, round_bf16(v)); }
SIMD_INLINE void store(fp16* p, V v) { _mm_storeu_si128((__m128i*)p, round_fp16(v)); }
SIMD_INLINE void store_n(float* p, V v, int n) { _mm256_maskstore_ps(p, first(n), v); }
SIMD_INLINE void store_n(bf16* p, V v, int n) { store_halves(p, round_bf16(v), n); }
SIMD_INLINE void store_n(fp16* p, V v, int n) { store_halves(p, round_fp16(v), n); }

SIMD_INLINE __m256i load_words(const void* p, int n) {
  return n == W ? _mm256_loadu_si256((const __m256i*)p) : _mm256_maskload_epi32((const int*)p, first(n));
}
SIMD_INLINE void load_pairs(const bf16* p, int n, V& even, V& odd) {
  const __m256i both = load_words(p, n);
  even = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
  odd = _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(int(0xffff0000))));
}
SIMD_INLINE __m128i low_halves(__m256i words) {
  const __m256i low = _mm256_and_si256(words, _mm256_set1_epi32(0xffff));
  return _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
}
SIMD_INLINE void load_pairs(const fp16* p, int n, V& even, V& odd) {
  const __m256i both = load_words(p, n);
  even = _mm256_cvtph_ps(low_halves(both));
  odd = _mm256_cvtph_ps(low_halves(_mm256_srli_epi32(both, 16)));
}


// A blend costs less than a shuffle, and a horizontal add is two shuffles and more.
SIMD_INLINE V sum2(V a, V b) { return add(_mm256_blend_ps(a, b, 0xcc), _mm256_shuffle_ps(a, b, 0x4e)); }
SIMD_INLINE V sum4(V a, V b, V c, V d) {
  const V ab = sum2(a, b), cd = sum2(c, d);
  return add(_mm256_shuffle_ps(ab, cd, 0x88), _mm256_shuffle_ps(ab, cd, 0xdd));
}
SIMD_INLINE V join(const V* parts) {
  return add(_mm256_blend_ps(parts[0], parts[1], 0xf0), _mm256_permute2f128_ps(parts[0], parts[1], 0x21));
}

// In place: lane j of rows[i] becomes lane i of rows[j].
SIMD_INLINE void transpose(V* rows) {
  V pairs[8], quads[8];
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      quads[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
      quads[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xee);
    }
  }
  for (int j = 0; j < 4; ++j) {
    rows[j] = _mm256_permute2f128_ps(quads[j], quads[j + 4], 0x20);
    rows[j + 4] = _mm256_permute2f128_ps(quads[j], quads[j + 4], 0x31);
  }
}

SIMD_INLINE V exp2(V x) {
  const V tiny = _mm256_cmp_ps(x, set1(-126.0f), _CMP_LT_OQ);  // below the normal range: 0
  x = max(set1(-126.0f), x);  // in this order a NaN stays one
  const V whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const V f = _mm256_sub_ps(x, whole);
  V y = set1(EXP2_POLY[5]);
  for (int i = 4; i >= 0; --i) y = fma(y, f, set1(EXP2_POLY[i]));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
  return _mm256_andnot_ps(tiny, mul(y, _mm256_castsi256_ps(power)));
}
}  // namespace simd

namespace {
using namespace simd;

using T = bf16;        // q, out
using C = bf16;  // cache

constexpr int up(int n, int to) { return (n + to - 1) / to * to; }
constexpr int KV_HEADS = 2, GROUP = 8;
constexpr int D = 128, DV = 128, BLOCK = 24;
constexpr int TILE_KV = 64, TILE_Q = 16, SPLIT_KV = 1024;
constexpr int ROW_BLOCK = 4, ROW_BLOCK_PACKED = 6;
constexpr int PACK_ROWS = 16, PREFETCH = 1, TILE_FEW = 64;
constexpr bool CAUSAL = true;

constexpr int DP = up(D, W), DVP = up(DV, W);  // rows of scratch are whole vectors, zero-filled
constexpr int TS = up(TILE_KV, W) + W;         // a row of scores; one vector of slack for unaligned stores
// Up to this many query tokens one tile holds all rows of a sequence, and its tokens are split instead.
constexpr int SPLIT_Q = std::max(1, std::min(TILE_Q, PACK_ROWS / GROUP));
constexpr int ROWS = TILE_Q * GROUP;
constexpr int PART = DVP + 2;  // a merged part: unnormalised output, maximum, sum
constexpr float LOG2E = 1.44269504088896341f, LN2 = 0.69314718055994531f, NONE = -INFINITY;

// The same address, as one that the compiler knows nothing of. What is read through it stays an operand in memory where it
// is used: GCC moves loads that a loop repeats in front of it, whether there are registers for them or not.
template <class U>
inline __attribute__((always_inline)) const U* anew(const U* p) {
  asm volatile("" : "+r"(p));
  return p;
}

template <class U>
inline __attribute__((always_inline)) V load_dims(const U* p, int left) {
  return left >= W ? load(p) : load_n(p, left);
}

struct Range {
  int64_t from, to;  // tokens
};

struct Tile {
  int64_t t;  // its first token
  int count;  // its tokens
  const C *k[up(TILE_KV, W)], *v[TILE_KV];  // where they begin; K of the last once more, up to a whole vector
};

constexpr int K_LINES = 4;  // cache lines of a token
constexpr int K_SPANS = (TILE_KV / BLOCK + 2) * 64;  // pieces of memory that a tile may lie in
constexpr int V_LINES = 4;  // cache lines of a token
constexpr int V_SPANS = TILE_KV;  // pieces of memory that a tile may lie in

// Memory of the tile ahead, prefetched line by line beside the work on a tile: in the order of memory, which is the order that
// the processor's own prefetchers and the memory's open rows like, and at an even pace, for a burst would fill the queue of
// misses that the work's own loads stand in.
// It fills all the same where the work is quicker than memory, and then AMD's processors seem to drop prefetches: lines of a while
// ago are prefetched again, which costs little where they have come.
struct Span {
  const char *at, *end, *from;
};
template <int MOST>
struct Ahead {
  Span list[MOST], *next = list, *last = list, now = {};
  int due = 0;

  void begin() { next = last = list, now = {}, due = 0; }
  // What follows the spans so far and is as one with them lengthens the last.
  void add(const C* from, int64_t bytes) {
    const char* at = reinterpret_cast<const char*>(from);
    if (last > list && last[-1].end == at) last[-1].end += bytes;
    else if (last < list + MOST) *last++ = {at, at + bytes, at};
  }
  // `lines` lines from `at` on, across the ends of spans. No call, inlined by force: a call takes the sums of a loop out of their
  // registers, and to GCC a function that only prefetches does nothing, and its call may go.
  inline __attribute__((always_inline)) Span walk(Span at, int lines) {
    for (; lines > 0; --lines, at.at += 64) {
      if (at.at >= at.end) {
        if (next == last) return {};
        at = *next++;
      }
      __builtin_prefetch(at.at, 0, 3);
    }
    return at;
  }
  // Reads it all at once: prefetched in a burst it would come late, where in the order of memory the processor looks ahead.
  void read() const {
    for (const Span* span = list; span < last; ++span)
      for (const char* p = span->at; p < span->end; p += 64) *static_cast<const volatile char*>(p);
  }
  void fetch(int lines) {
    if (PREFETCH > 0) now = walk(now, lines);
  }
};

// The same from within a loop: where one stands, in registers. A token of LINES takes ALL products, a step is DONE of them.
template <int LINES, int ALL, int MOST>
struct Pace {
  Ahead<MOST>& ahead;
  Span now = ahead.now;
  int due = ahead.due;

  template <int N>
  inline __attribute__((always_inline)) void fetch() {
    if (now.end - now.at >= N * 64) {
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) {
        __builtin_prefetch(now.at + i * 64, 0, 3);
        __builtin_prefetch(now.at + i * 64 - std::min<int64_t>(512, now.at + i * 64 - now.from), 0, 3);
        __builtin_prefetch(now.at + i * 64 - std::min<int64_t>(1024, now.at + i * 64 - now.from), 0, 3);
        __builtin_prefetch(now.at + i * 64 - std::min<int64_t>(1536, now.at + i * 64 - now.from), 0, 3);
        __builtin_prefetch(now.at + i * 64 - std::min<int64_t>(2048, now.at + i * 64 - now.from), 0, 3);
        __builtin_prefetch(now.at + i * 64 - std::min<int64_t>(2560, now.at + i * 64 - now.from), 0, 3);
        __builtin_prefetch(now.at + i * 64 - std::min<int64_t>(3072, now.at + i * 64 - now.from), 0, 3);
      }
      now.at += N * 64;
    } else {
      now = ahead.walk(now, N);
    }
  }
  template <int DONE>
  inline __attribute__((always_inline)) void step() {
    if (PREFETCH == 0) return;
    if constexpr (DONE * LINES / ALL > 0) fetch<DONE * LINES / ALL>();
    if constexpr (DONE * LINES % ALL > 0)
      if ((due += DONE * LINES % ALL) >= ALL) due -= ALL, fetch<1>();
  }
  ~Pace() { ahead.now = now, ahead.due = due; }
};

// What one thread works in. Sizes are compile-time facts, so the workspace is one multiplication.
struct alignas(64) Scratch {
  float q[ROWS][DP];  // scaled by softmax scale * log2(e)
  float s[ROWS][TS];  // scores, then weights
  float o[ROWS][DVP];
  float m[ROWS], l[ROWS], alpha[ROWS];
  V total[ROWS];  // what l is the sum of
  int64_t limit[ROWS];  // tokens that a row sees
  float k_tile[D][TS];
  float v_tile[TILE_KV][DVP];
  Tile tiles[PREFETCH + 1];
  Ahead<K_SPANS> k_ahead;
  Ahead<V_SPANS> v_ahead;
};

struct Sequence {
  int64_t tokens, context;
  int64_t shared;  // parts of the shared prefix: only where the rows are too few for a tile of their own
  int64_t from;    // its own parts begin here: behind that prefix, and not before the window
  int64_t parts;   // all: of the context in decode, 1 in prefill
};

inline int64_t parts_of(int64_t tokens) { return (tokens + SPLIT_KV - 1) / SPLIT_KV; }

// Tokens of the shared prefix that are computed for many sequences at once.
inline int64_t prefix_of(const pg_attend_args& a) {
  return a.shared_prefix_len;
}

inline Sequence sequence(const pg_attend_args& a, int64_t s) {
  const int64_t tokens = a.cu_seqlens_q[s + 1] - a.cu_seqlens_q[s], context = a.context_lens[s];
  if (tokens > SPLIT_Q) return {tokens, context, 0, 0, 1};
  int64_t from = prefix_of(a);
  const int64_t shared = parts_of(from);
  return {tokens, context, shared, from, shared + std::max<int64_t>(1, parts_of(context) - from / SPLIT_KV)};
}

// KV heads of one item. In decode it takes `together` of them, as far as it has room for their rows.
inline int64_t heads_of(const Sequence& seq, int64_t together) {
  return seq.tokens <= SPLIT_Q ? std::clamp<int64_t>(TILE_Q / std::max<int64_t>(1, seq.tokens), 1, together) : 1;
}

// Ranges of tokens, or of query tokens, into which a sequence is cut.
inline int64_t pieces_of(const Sequence& seq) {
  if (seq.tokens == 0) return 0;
  return seq.tokens <= SPLIT_Q ? seq.parts - seq.shared : (seq.tokens + TILE_Q - 1) / TILE_Q;
}

inline int64_t items_of(const Sequence& seq, int64_t together) {
  const int64_t heads = heads_of(seq, together);
  return (KV_HEADS + heads - 1) / heads * pieces_of(seq);
}

inline int64_t part_rows_of(const Sequence& seq) {
  return seq.parts > 1 ? KV_HEADS * seq.parts * seq.tokens * GROUP : 0;
}

int32_t validate(const pg_attend_args& a) {
  if (a.size < sizeof(pg_attend_args)) return PG_E_SIZE;
  if (a.cu_seqlens_q[0] != 0 || a.cu_seqlens_q[a.num_seqs] > a.num_tokens) return PG_E_CU_SEQLENS;
  if (a.shared_prefix_len < 0 || a.shared_prefix_len % BLOCK) return PG_E_PREFIX;
  for (int64_t s = 0; s < a.num_seqs; ++s) {
    if (a.cu_seqlens_q[s + 1] < a.cu_seqlens_q[s]) return PG_E_CU_SEQLENS;
    const int64_t context = a.context_lens[s];
    if (context < 0 || context > a.table_width * BLOCK) return PG_E_CONTEXT;
    if (context < a.shared_prefix_len) return PG_E_PREFIX;
    const int32_t* table = a.block_table + s * a.block_table_stride;
    if (!std::equal(table, table + a.shared_prefix_len / BLOCK, a.block_table)) return PG_E_PREFIX;
    uint32_t highest = 0;  // as unsigned, a negative id is the highest of all
    const int64_t blocks = (context + BLOCK - 1) / BLOCK;
    for (int64_t b = 0; b < blocks; ++b) highest = std::max(highest, uint32_t(table[b]));
    if (blocks && highest >= uint64_t(a.num_blocks)) return PG_E_BLOCK_ID;
  }
  return PG_OK;
}

// The workspace: first item, part row and sharing query token of each sequence, one Scratch a thread, the parts.
struct Workspace {
  int64_t *first_item, *first_part, *first_sharing;
  Scratch* scratch;
  float* parts;
  int64_t bytes, together = 1;

  Workspace(const pg_attend_args& a, int64_t part_rows) {
    const int64_t prefix = int64_t(sizeof(int64_t)) * (a.num_seqs + 1), prefixes = (3 * prefix + 63) / 64 * 64;
    const int64_t scratches = int64_t(sizeof(Scratch)) * std::max(1, a.num_threads);
    const uintptr_t base = uintptr_t(a.workspace);  // null while the size is being asked for
    first_item = reinterpret_cast<int64_t*>(base);
    first_part = reinterpret_cast<int64_t*>(base + prefix);
    first_sharing = reinterpret_cast<int64_t*>(base + 2 * prefix);
    scratch = reinterpret_cast<Scratch*>(base + prefixes);
    parts = reinterpret_cast<float*>(base + prefixes + scratches);
    bytes = prefixes + scratches + part_rows * PART * int64_t(sizeof(float));
  }

  // The sequence in which the item, or sharing query token, of this index lies.
  static int64_t sequence_of(const pg_attend_args& a, const int64_t* first, int64_t index) {
    return std::upper_bound(first, first + a.num_seqs + 1, index) - first - 1;
  }

  // Where a part of a row lies; `row` counts in the sequence.
  float* part(int64_t s, const Sequence& seq, int64_t head, int64_t piece, int64_t row) const {
    return parts + (first_part[s] + (head * seq.parts + piece) * seq.tokens * GROUP + row) * PART;
  }
};

// --- one tile ---------------------------------------------------------------------------------------------------------

// Makes `tile` the tokens from t on, of those in `range`: where each begins, through the block table.
inline void locate(const pg_attend_args& a, const int32_t* table, int64_t head, int64_t t, Range range, Tile& tile, int length) {
  const C* k_head = static_cast<const C*>(a.k_cache) + head * a.k_stride_head;
  const C* v_head = static_cast<const C*>(a.v_cache) + head * a.v_stride_head;
  const int count = int(std::clamp<int64_t>(range.to - t, 0, length));
  tile.t = t;
  tile.count = count;
  for (int i = 0; i < count;) {
    const int64_t block = table[(t + i) / BLOCK];  // 64 bits before any multiplication
    const int in_block = int((t + i) % BLOCK), run = std::min(count - i, BLOCK - in_block);
    const C* k_token = k_head + block * a.k_stride_block + in_block * a.k_stride_token;
    const C* v_token = v_head + block * a.v_stride_block + in_block * a.v_stride_token;
    for (int j = 0; j < run; ++j, ++i) {
      tile.k[i] = k_token + j * a.k_stride_token;
      tile.v[i] = v_token + j * a.v_stride_token;
    }
  }
  if (count > 0) std::fill(tile.k + count, tile.k + up(count, W), tile.k[count - 1]);
}

// Tokens from `i` on, up to the end of the tile, that lie in one block.
[[maybe_unused]] inline int run_of(const Tile& tile, int i) { return std::min(tile.count - i, BLOCK - int((tile.t + i) % BLOCK)); }

constexpr int BURST = 32;  // tokens whose pages are touched together: about eight
constexpr int PAGE = 4096;  // of the smallest: a page of 2 MiB may be one of a virtual machine, which its host maps to small ones

// Touches the pages of `length` tokens from t on, a line of each, well before their lines are prefetched: a processor does not go on
// from a prefetch before it has translated its address, and translates several at a time where they come one after the other.
inline __attribute__((always_inline)) void touch(const pg_attend_args& a, const int32_t* table, int64_t head, int heads, int64_t t, Range range, int length) {
  if (PREFETCH == 0) return;
  // Those of `count` rows of `width` numbers, with what lies between them if that is less than a page.
  const auto pages = [](const C* first, int64_t count, int64_t width, int64_t stride) __attribute__((always_inline)) {
    if (stride * int(sizeof(C)) < PAGE) width += (count - 1) * stride, count = 1;
    for (; count > 0; --count, first += stride) {
      const char* p = reinterpret_cast<const char*>(first);
      for (const char* const end = p + width * int(sizeof(C)); p < end; p += PAGE - reinterpret_cast<uintptr_t>(p) % PAGE) __builtin_prefetch(p, 0, 2);
    }
  };
  for (const int64_t end = std::min<int64_t>(t + length, range.to); t < end;) {
    const int64_t block = table[t / BLOCK], in_block = t % BLOCK, run = std::min<int64_t>(end - t, BLOCK - in_block);
    const C* k = static_cast<const C*>(a.k_cache) + block * a.k_stride_block + head * a.k_stride_head;
    if (in_block == 0) pages(k, heads, BLOCK * 128, a.k_stride_head);
    const C* v = static_cast<const C*>(a.v_cache) + block * a.v_stride_block + head * a.v_stride_head;
    if (in_block == 0) pages(v, heads, BLOCK * 128, a.v_stride_head);
    t += run;
  }
}

// What `width` numbers from `offset` on of each token take up: the tokens of a block in one, where they have nothing between them.
template <int MOST>
inline void add_tokens(Ahead<MOST>& to, const Tile& tile, const C* const* tokens, int64_t offset, int64_t width, int64_t stride) {
  for (int i = 0, step; i < tile.count; i += step) {
    step = width == stride ? run_of(tile, i) : 1;
    to.add(tokens[i] + offset, step * width * int(sizeof(C)));
  }
}

// Tells what of the tile ahead is prefetched beside head h of a tile, in the order of memory.
inline void look_ahead(Scratch& w, const pg_attend_args& a, const Tile& ahead, int h, [[maybe_unused]] int heads) {
  if (PREFETCH == 0) return;
  w.k_ahead.begin();
  for (int i = 0; i < ahead.count; i += run_of(ahead, i))
    for (int d = 0; d < D / 2; ++d)
      w.k_ahead.add(ahead.k[i] + h * a.k_stride_head + d * a.k_stride_dim, run_of(ahead, i) * 2 * int(sizeof(C)));
  w.v_ahead.begin();
  add_tokens(w.v_ahead, ahead, ahead.v, h * a.v_stride_head, 128, a.v_stride_token);
}

// Keys of the tile up to the last that a row sees.
inline int seen_of(const Scratch& w, int row, const Tile& tile) {
  return int(std::clamp<int64_t>(w.limit[row] - tile.t, 0, tile.count));
}


// Calls f(rows as a constant, first row) over rows from `row` to `end` in blocks of B, then once for what is left.
template <int B, class F>
inline void row_blocks(int row, int end, F f) {
  for (; row + B <= end; row += B) f(std::integral_constant<int, B>{}, row);
  if constexpr (B > 1) {
    if (row < end) row_blocks<B - 1>(row, end, f);
  }
}

// Scores of R rows against dim-major K in place: lanes are tokens, no sums across lanes.
template <int R>
inline void score(Scratch& w, int row, const Tile& tile, const pg_attend_args& a) {
  constexpr int MOST = std::clamp(BLOCK / W, 1, 4 * R <= REGISTERS * 3 / 4 ? 4 : 2);  // vectors of tokens whose sums stay in registers
  Pace<K_LINES, GROUP * DP / W, K_SPANS> pace{w.k_ahead};
  const auto some = [&](auto vectors, int i, int n) {
    constexpr int VECTORS = vectors;
    constexpr int CHAINS = R * MOST < 8 ? 2 : 1;  // to cover the latency of an FMA
    V sums[R][VECTORS][CHAINS];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < VECTORS; ++c)
        for (int j = 0; j < CHAINS; ++j) sums[r][c][j] = zero();
    for (int d = 0; d < D; d += 2) {
      for (int c = 0; c < VECTORS; ++c) {
        pace.template step<2 * R>();
        V k0, k1;
        load_pairs(tile.k[i] + d / 2 * a.k_stride_dim + 2 * c * W, VECTORS > 1 ? W : n, k0, k1);
        for (int r = 0; r < R; ++r) {
          sums[r][c][0] = fma(set1(w.q[row + r][d]), k0, sums[r][c][0]);
          sums[r][c][CHAINS - 1] = fma(set1(w.q[row + r][d + 1]), k1, sums[r][c][CHAINS - 1]);
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < VECTORS; ++c) store(&w.s[row + r][i + c * W], CHAINS > 1 ? add(sums[r][c][0], sums[r][c][CHAINS - 1]) : sums[r][c][0]);
  };
  for (int i = 0; i < tile.count;) {
    const int n = run_of(tile, i);
    if (MOST > 1 && n >= MOST * W) some(std::integral_constant<int, MOST>{}, i, MOST * W), i += MOST * W;
    else some(std::integral_constant<int, 1>{}, i, std::min(W, n)), i += std::min(W, n);
  }
}

// K of a tile to fp32, dim-major: k_tile[d][token], dims in the order of q.
inline void pack_k(Scratch& w, const Tile& tile, const pg_attend_args& a) {
  for (int i = 0; i < tile.count;) {
    const int n = run_of(tile, i);
    w.k_ahead.fetch(n * K_LINES);
    for (int d = 0; d < D; d += 2)
      for (int j = 0; j < n; j += W) {
        V even, odd;
        load_pairs(tile.k[i] + d / 2 * a.k_stride_dim + 2 * j, std::min(W, n - j), even, odd);
        store_n(&w.k_tile[d][i + j], even, std::min(W, n - j));
        store_n(&w.k_tile[d + 1][i + j], odd, std::min(W, n - j));
      }
    i += n;
  }
  for (int d = 0; d < D; ++d)
    for (int i = tile.count; i < up(tile.count, 2 * W) && i < TS; ++i) w.k_tile[d][i] = 0;
}

// V of a tile to fp32, token-major: v_tile[token][d], dims in the order of the output.
inline void pack_v(Scratch& w, const Tile& tile, const pg_attend_args& a) {
  for (int i = 0; i < tile.count; ++i) {
    w.v_ahead.fetch(V_LINES);
    for (int d = 0; d < DV; d += 2 * W) {
      V even, odd;
      load_pairs(tile.v[i] + d, W, even, odd);
      store(&w.v_tile[i][d], even);
      store(&w.v_tile[i][d + W], odd);
    }
  }
  (void)a;
}

// Scores of R rows against the packed tile.
template <int R>
inline void score_packed(Scratch& w, int row, int count) {
  constexpr int VECTORS = TILE_KV >= 2 * W ? 2 : 1;
  for (int t = 0; t < count; t += VECTORS * W) {
    V acc[R][VECTORS];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < VECTORS; ++c) acc[r][c] = zero();
    for (int d = 0; d < D; ++d) {
      V k[VECTORS];
      for (int c = 0; c < VECTORS; ++c) k[c] = load(&w.k_tile[d][t + c * W]);
      for (int r = 0; r < R; ++r) {
        const V q = set1(w.q[row + r][d]);
        for (int c = 0; c < VECTORS; ++c) acc[r][c] = fma(q, k[c], acc[r][c]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < VECTORS; ++c) store(&w.s[row + r][t + c * W], acc[r][c]);
  }
}

// W dims of a token's V from d on, and W more, in place.
inline auto v_in_place(const Tile& tile) {
  return [&](int i, int d, V* to) { load_pairs(tile.v[i] + d, W, to[0], to[1]); };
}

inline auto v_packed(const Scratch& w) {
  return [&](int i, int d, V* to) { to[0] = load(&w.v_tile[i][d]), to[1] = load(&w.v_tile[i][d + W]); };
}

// Brings the dims of the rows' output back into their order.
inline void restore(Scratch& w, int rows) {
  for (int row = 0; row < rows; ++row)
    for (int d = 0; d < DV; d += 2 * W) {
      float split[2 * W];
      std::copy_n(&w.o[row][d], 2 * W, split);
      for (int i = 0; i < W; ++i) w.o[row][d + 2 * i] = split[i], w.o[row][d + 2 * i + 1] = split[W + i];
    }
}

// One online-softmax step of the rows from `first` to `end`: scores become weights; weights of tokens that a row does not
// see are 0. What takes long in one row is done for all before the next thing, so that rows wait side by side. Most tiles have no
// higher score than those before: only where one has, lanes are compared with each other. Sums stay lane by lane.
inline void softmax(Scratch& w, int first, int end, const Tile& tile) {
  bool higher = false;
  for (int row = first; row < end; ++row) {
    float* s = w.s[row];
    const int seen = seen_of(w, row, tile);
    V highest = set1(NONE);
    for (int i = 0; i < seen; i += W) {
      V v = load(s + i);
      if (seen - i < W) store(s + i, v = keep(v, seen - i, NONE));
      highest = max(highest, v);
    }
    w.alpha[row] = 0.0f;
    if (any_above(highest, w.m[row])) {
      const float m = std::max(w.m[row], top(highest));
      w.alpha[row] = w.m[row] - m;
      w.m[row] = m;
      higher = true;
    }
  }
  for (int row = first; row < end; row += W) {
    float* alpha = w.alpha + row;
    const int left = end - row;
    if (!higher) std::fill(alpha, alpha + std::min(left, W), 1.0f);
    else if (left >= W) store(alpha, exp2(load(alpha)));
    else store_n(alpha, exp2(load_n(alpha, left)), left);
  }
  for (int row = first; row < end; ++row) {
    float* s = w.s[row];
    const int count = tile.count, seen = w.m[row] == NONE ? 0 : seen_of(w, row, tile);
    const V m = set1(-w.m[row]), alpha = set1(w.alpha[row]);
    V total = mul(w.total[row], alpha);
    const auto weigh = [&](int i) {
      const V p = exp2(add(load(s + i), m));
      total = add(total, p);
      return p;
    };
    int i = 0;
    for (; i < seen; i += W) store(s + i, weigh(i));
    for (; i < count; i += W) store(s + i, zero());
    w.total[row] = total;
  }
}

// o[r] = o[r] * alpha[r] + weights[r] . V for R rows and CHUNKS vectors of dims from chunk c0 on, which stay in registers.
// `v(i, d, to)` gives dims of token i from dim d on: UNIT vectors. `step` is called before each.
template <int R, int CHUNKS, class F, class G>
inline __attribute__((always_inline)) void accumulate_chunks(Scratch& w, int row, const Tile& tile, int c0, F v, G step) {
  constexpr int UNIT = 2;
  const int steps = tile.count;
  V acc[R][up(CHUNKS, UNIT)];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < up(CHUNKS, UNIT); ++c) acc[r][c] = c < CHUNKS ? mul(load(&w.o[row + r][(c0 + c) * W]), set1(w.alpha[row + r])) : zero();
  for (int i = 0; i < steps; ++i) {
    // Unrolled by name: with branches within, as a step has, GCC leaves the sums in memory else.
#pragma GCC unroll 32
    for (int c = 0; c < CHUNKS; c += UNIT) {
      step();
      V vv[UNIT];
      v(i, (c0 + c) * W, vv);
#pragma GCC unroll 32
      for (int r = 0; r < R; ++r) {
        const V weight = set1(w.s[row + r][i]);
#pragma GCC unroll 4
        for (int j = 0; j < UNIT; ++j) acc[r][c + j] = fma(weight, vv[j], acc[r][c + j]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < CHUNKS; ++c) store(&w.o[row + r][(c0 + c) * W], acc[r][c]);
}

// How many of `all` chunks, in units, one pass takes with registers for `most`: a divisor if that is half of them or more, for a
// last pass of few chunks has too few sums under way, else what makes the passes even.
constexpr int chunks_of(int all, int most, int unit) {
  for (int step = most; 2 * step >= most; step -= unit)
    if (all % step == 0) return step;
  const int passes = (all + most - 1) / most;
  return up((all + passes - 1) / passes, unit);
}

// The same for all dims. In place, rows of the tile ahead are prefetched beside.
template <int R, bool IN_PLACE, class F>
inline void accumulate(Scratch& w, int row, const Tile& tile, F v) {
  constexpr int FREE = REGISTERS * 3 / 4 - (REGISTERS == 16 && IN_PLACE ? 2 : 0);  // of the registers, for accumulators
  constexpr int CHUNKS = DVP / W, UNIT = 2, BUDGET = std::clamp(FREE / R / UNIT * UNIT, UNIT, up(CHUNKS, UNIT));
  constexpr int STEP = chunks_of(CHUNKS, BUDGET, UNIT), REST = CHUNKS % STEP;
  Pace<V_LINES, GROUP * CHUNKS, V_SPANS> pace{w.v_ahead};
  const auto step = [&] {
    if (IN_PLACE) pace.template step<R * UNIT>();
  };
  for (int c0 = 0; c0 + STEP <= CHUNKS; c0 += STEP) accumulate_chunks<R, STEP>(w, row, tile, c0, v, step);
  if constexpr (REST > 0) accumulate_chunks<R, REST>(w, row, tile, CHUNKS - REST, v, step);
}

// Scores of the rows from `first` to `end` on a tile, in place or packed.
inline void scores(Scratch& w, int first, int end, [[maybe_unused]] bool packed, const Tile& tile, const pg_attend_args& a) {
  if (!packed) {
    row_blocks<ROW_BLOCK>(first, end, [&](auto r, int row) { score<r>(w, row, tile, a); });
    return;
  }
  pack_k(w, tile, a);
  row_blocks<ROW_BLOCK_PACKED>(first, end, [&](auto r, int row) { score_packed<r>(w, row, tile.count); });
}

// Weighted sums of a tile's values for the rows from `first` to `end`, in place or packed.
inline void values(Scratch& w, int first, int end, [[maybe_unused]] bool packed, const Tile& tile, const pg_attend_args& a) {
  if (!packed) {
    row_blocks<ROW_BLOCK>(first, end, [&](auto r, int row) { accumulate<r, true>(w, row, tile, v_in_place(tile)); });
    return;
  }
  pack_v(w, tile, a);
  row_blocks<ROW_BLOCK_PACKED>(first, end, [&](auto r, int row) { accumulate<r, false>(w, row, tile, v_packed(w)); });
}

// --- one work item ----------------------------------------------------------------------------------------------------

inline const T* q_row(const pg_attend_args& a, int64_t token, int64_t head) {
  return static_cast<const T*>(a.q) + token * a.q_stride_token + head * a.q_stride_head;
}

inline void clear(Scratch& w, int row) {
  std::fill(w.o[row], w.o[row] + DVP, 0.0f);
  w.m[row] = NONE;
  w.total[row] = zero();
}

// Loads rows of query tokens [first, first + tokens) of sequence s, KV head `head`, as the item's tokens from `at` on;
// row = token * GROUP + query head.
void begin(Scratch& w, const pg_attend_args& a, int64_t s, const Sequence& seq, int64_t head, int64_t first, int tokens, int at = 0) {
  const V scale = set1(a.scale * LOG2E);
  for (int i = 0; i < tokens; ++i) {
    const int64_t position = seq.context - seq.tokens + first + i;
    for (int g = 0; g < GROUP; ++g) {
      const int row = (at + i) * GROUP + g;
      const T* q = q_row(a, a.cu_seqlens_q[s] + first + i, head * GROUP + g);
      for (int d = 0; d < D; d += W) store(&w.q[row][d], mul(load_dims(q + d, D - d), scale));
      clear(w, row);
      w.limit[row] = std::clamp<int64_t>(position + 1, 0, seq.context);
    }
  }
}

// Attends `rows` rows of each of `heads` KV heads from `head` on to those tokens of `range`, in sequence s, that they see.
void run(Scratch& w, const pg_attend_args& a, int64_t s, int64_t head, int heads, int rows, Range range) {
  const int32_t* table = a.block_table + s * a.block_table_stride;
  const bool packed = rows >= PACK_ROWS;
  range.to = std::min(range.to, *std::max_element(w.limit, w.limit + rows));
  const int64_t from = range.from;
  const int length = packed ? TILE_KV : std::min(TILE_FEW, TILE_KV);
  const auto tile_at = [&](int64_t t) -> Tile& { return w.tiles[(t - from) / length % (PREFETCH + 1)]; };
  for (int64_t t = from; t < from + PREFETCH * length; t += length) locate(a, table, head, t, range, tile_at(t), length);
  const int burst = up(BURST, length);
  touch(a, table, head, heads, from, range, (PREFETCH + 1) * length);
  if (PREFETCH > 0 && !packed) {
    look_ahead(w, a, tile_at(from), 0, heads);
    w.k_ahead.read();
    w.v_ahead.read();
  }
  for (int64_t t = from; t < range.to; t += length) {
    Tile& ahead = tile_at(t + PREFETCH * length);
    locate(a, table, head, t + PREFETCH * length, range, ahead, length);
    if ((t - from) % burst == 0) touch(a, table, head, heads, t + (PREFETCH + 1) * length, range, burst);
    Tile& tile = tile_at(t);
    for (int h = 0; h < heads; ++h) {
      const int first = h * rows, end = first + rows;
      if (h > 0) {
        for (int i = 0; i < up(tile.count, W); ++i) tile.k[i] += a.k_stride_head;
        for (int i = 0; i < tile.count; ++i) tile.v[i] += a.v_stride_head;
      }
      look_ahead(w, a, ahead, h, heads);
      scores(w, first, end, packed, tile, a);
      softmax(w, first, end, tile);
      values(w, first, end, packed, tile, a);
    }
  }
  restore(w, heads * rows);
  for (int row = 0; row < heads * rows; ++row) w.l[row] = sum(w.total[row]);
}

// Divides a row by its sum and stores it; a row that saw no token becomes 0 with lse -inf.
void finish(const pg_attend_args& a, int64_t token, int64_t head, const float* o, float m, float l) {
  T* out = static_cast<T*>(a.out) + token * a.out_stride_token + head * a.out_stride_head;
  const V inverse = set1(l == 0.0f ? 0.0f : 1.0f / l);
  for (int d = 0; d < DV; d += W) {
    const V v = mul(load(o + d), inverse);
    if (DV - d >= W) store(out + d, v);
    else store_n(out + d, v, DV - d);
  }
  (void)m;
}

// Adds a part of a row to those merged before it. Not inlined: prefill and decode must round alike.
__attribute__((noinline)) void fold(float* merged, const float* o, float m, float l) {
  const float highest = std::max(merged[DVP], m);
  if (highest == NONE) return;
  const V before = exp2(set1(merged[DVP] - highest)), weight = exp2(set1(m - highest));
  for (int d = 0; d < DVP; d += W) store(merged + d, fma(weight, load(o + d), mul(before, load(merged + d))));
  merged[DVP + 1] = top(before) * merged[DVP + 1] + top(weight) * l;
  merged[DVP] = highest;
}

// Stores what an item gave a row as a part of it.
void keep_part(const Scratch& w, int row, float* part) {
  std::copy(w.o[row], w.o[row] + DVP, part);
  part[DVP] = w.m[row];
  part[DVP + 1] = w.l[row];
}

// A part of the shared prefix, for a tile of the query tokens of all sequences that share it.
void prefix_item(const pg_attend_args& a, const Workspace& ws, Scratch& w, int64_t index) {
  const int64_t sharing = ws.first_sharing[a.num_seqs], tiles = (sharing + TILE_Q - 1) / TILE_Q;
  const int64_t first = index % tiles * TILE_Q, head = index / tiles % KV_HEADS, piece = index / tiles / KV_HEADS;
  const int tokens = int(std::min<int64_t>(TILE_Q, sharing - first));
  const auto each = [&](auto f) {
    for (int i = 0; i < tokens; ++i) {
      const int64_t s = ws.sequence_of(a, ws.first_sharing, first + i);
      f(i, s, sequence(a, s), first + i - ws.first_sharing[s]);
    }
  };
  each([&](int i, int64_t s, const Sequence& seq, int64_t token) { begin(w, a, s, seq, head, token, 1, i); });
  run(w, a, 0, head, 1, tokens * GROUP, {piece * SPLIT_KV, std::min((piece + 1) * SPLIT_KV, prefix_of(a))});
  each([&](int i, int64_t s, const Sequence& seq, int64_t token) {
    for (int g = 0; g < GROUP; ++g) keep_part(w, i * GROUP + g, ws.part(s, seq, head, piece, token * GROUP + g));
  });
}

void item(const pg_attend_args& a, const Workspace& ws, Scratch& w, int64_t index) {
  if (index < ws.first_item[0]) return prefix_item(a, ws, w, index);
  const int64_t s = ws.sequence_of(a, ws.first_item, index);
  const Sequence seq = sequence(a, s);
  const int64_t local = index - ws.first_item[s];
  const bool split = seq.tokens <= SPLIT_Q;
  const int64_t pieces = pieces_of(seq), together = heads_of(seq, ws.together);
  // In decode the heads of the same tokens one behind the other, for they lie close; in prefill the tokens of a head.
  const int64_t groups = (KV_HEADS + together - 1) / together;
  const int64_t head = (split ? local % groups : local / pieces) * together, piece = split ? local / groups : local % pieces;
  const int heads = int(std::min(together, KV_HEADS - head));
  const int64_t first = split ? 0 : piece * TILE_Q;
  const int tokens = int(std::min<int64_t>(TILE_Q, seq.tokens - first)), rows = tokens * GROUP;
  for (int h = 0; h < heads; ++h) begin(w, a, s, seq, head + h, first, tokens, h * tokens);
  if (seq.parts > 1) {
    const int64_t from = (seq.from / SPLIT_KV + piece) * SPLIT_KV, to = std::min(from + SPLIT_KV, seq.context);
    run(w, a, s, head, heads, rows, {std::max(from, seq.from), to});
    for (int row = 0; row < heads * rows; ++row) keep_part(w, row, ws.part(s, seq, head + row / rows, seq.shared + piece, row % rows));
    return;
  }
  run(w, a, s, head, heads, rows, {0, seq.context});
  for (int row = 0; row < heads * rows; ++row) {
    finish(a, a.cu_seqlens_q[s] + first + row % rows / GROUP, (head + row / rows) * GROUP + row % GROUP, w.o[row], w.m[row], w.l[row]);
  }
}

// Merges the parts of every row of sequence s and one KV head, in order of their tokens.
void merge(const pg_attend_args& a, const Workspace& ws, int64_t s, int64_t head) {
  const Sequence seq = sequence(a, s);
  for (int64_t row = 0; row < seq.tokens * GROUP; ++row) {
    alignas(64) float merged[PART] = {};
    merged[DVP] = NONE;
    for (int64_t p = 0; p < seq.parts; ++p) {
      const float* part = ws.part(s, seq, head, p, row);
      fold(merged, part, part[DVP], part[DVP + 1]);
    }
    finish(a, a.cu_seqlens_q[s] + row / GROUP, head * GROUP + row % GROUP, merged, merged[DVP], merged[DVP + 1]);
  }
}
}  // namespace

PG_EXPORT int32_t pagegen_abi_version(void) { return PAGEGEN_ABI_VERSION; }

PG_EXPORT int64_t pagegen_attend_workspace(const pg_attend_args* args) {
  const int32_t status = validate(*args);
  if (status) return -status;
  int64_t part_rows = 0;
  for (int64_t s = 0; s < args->num_seqs; ++s) part_rows += part_rows_of(sequence(*args, s));
  return Workspace(*args, part_rows).bytes;
}

PG_EXPORT int32_t pagegen_attend(const pg_attend_args* args) {
  const pg_attend_args& a = *args;
  const int32_t status = validate(a);
  if (status) return status;
  int64_t part_rows = 0, sharing = 0, work = 0, longest = 0;
  for (int64_t s = 0; s < a.num_seqs; ++s) {
    const Sequence seq = sequence(a, s);
    part_rows += part_rows_of(seq);
    sharing += seq.shared ? seq.tokens : 0;
    if (seq.tokens == 0) continue;
    work += seq.context - seq.from;
    if (seq.tokens <= SPLIT_Q) longest = std::max(longest, std::min<int64_t>(SPLIT_KV, seq.context - seq.from));
  }
  Workspace ws(a, part_rows);
  if (a.workspace_bytes < uint64_t(ws.bytes)) return PG_E_WORKSPACE;
  // A thread that reads all heads of a token reads memory in its order, which prefetchers follow: a part with some heads only
  // costs more than half of the time again. So heads are shared among threads that would wait for each other for longer.
  const int64_t turn = longest * std::max(1, a.num_threads);  // tokens that all read while one reads the longest part
  if (turn > 0 && 2 * ((work + turn - 1) / turn) * turn <= 3 * work) ws.together = KV_HEADS;
  ws.first_item[0] = parts_of(prefix_of(a)) * KV_HEADS * ((sharing + TILE_Q - 1) / TILE_Q);
  ws.first_part[0] = ws.first_sharing[0] = 0;
  for (int64_t s = 0; s < a.num_seqs; ++s) {
    const Sequence seq = sequence(a, s);
    ws.first_item[s + 1] = ws.first_item[s] + items_of(seq, ws.together);
    ws.first_part[s + 1] = ws.first_part[s] + part_rows_of(seq);
    ws.first_sharing[s + 1] = ws.first_sharing[s] + (seq.shared ? seq.tokens : 0);
  }
  const int64_t items = ws.first_item[a.num_seqs];
#pragma omp parallel num_threads(std::max(1, a.num_threads))
  {
    Scratch& w = ws.scratch[omp_get_thread_num()];
    // From the end: the last query tiles of a prefill are its longest.
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = items - 1; i >= 0; --i) item(a, ws, w, i);
    if (part_rows) {
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < a.num_seqs * KV_HEADS; ++i) {
        if (sequence(a, i / KV_HEADS).parts > 1) merge(a, ws, i / KV_HEADS, i % KV_HEADS);
      }
    }
  }
  return PG_OK;
}

PG_EXPORT void* pagegen_attend_call(void* self, void* const* tensors, intptr_t count) {
  return python::call(self, tensors, count, pagegen_attend);
}
