// attend cpu:amx bf16-d64-h9x3-b16-NHD
// tile_kv=512 tile_q=64 split_kv=1024 tile_few=128 prefetch=1
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

// AVX512_BF16 and AVX512_VBMI: a lane takes two products of bf16 at a time.
namespace simd {
SIMD_INLINE __m512i bits(V v) { return _mm512_castps_si512(v); }
SIMD_INLINE V as_floats(__m512i v) { return _mm512_castsi512_ps(v); }

SIMD_INLINE V dot(V a, V b, V c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
SIMD_INLINE V set1_pair(const bf16* p) {
  float pair;  // not an integer, which GCC takes through a register of its own, to an operation of the shuffling ports
  std::memcpy(&pair, p, sizeof pair);
  return set1(pair);
}
SIMD_INLINE V set1_quad(const bf16* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps((const float*)p)); }
SIMD_INLINE void transpose4(V* rows) {
  const V a = _mm512_shuffle_f32x4(rows[0], rows[1], 0x44), b = _mm512_shuffle_f32x4(rows[0], rows[1], 0xee);
  const V c = _mm512_shuffle_f32x4(rows[2], rows[3], 0x44), d = _mm512_shuffle_f32x4(rows[2], rows[3], 0xee);
  rows[0] = _mm512_shuffle_f32x4(a, c, 0x88), rows[1] = _mm512_shuffle_f32x4(a, c, 0xdd);
  rows[2] = _mm512_shuffle_f32x4(b, d, 0x88), rows[3] = _mm512_shuffle_f32x4(b, d, 0xdd);
}
SIMD_INLINE V pairs(const bf16* p) { return load((const float*)p); }
SIMD_INLINE V pairs_n(const bf16* p, int n) { return as_floats(masked(_mm512_maskz_loadu_epi16((1ull << n) - 1, p))); }
SIMD_INLINE V pairs(V low, V high) { return as_floats((__m512i)_mm512_cvtne2ps_pbh(high, low)); }
SIMD_INLINE void store_pairs(bf16* p, V low, V high) { store((float*)p, pairs(low, high)); }
SIMD_INLINE void interleave(V a, V b, V& low, V& high) {
  low = as_floats(_mm512_unpacklo_epi16(bits(a), bits(b)));
  high = as_floats(_mm512_unpackhi_epi16(bits(a), bits(b)));
}
SIMD_INLINE V zip(V a, V b) {
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
  return as_floats(_mm512_ternarylogic_epi32(upper, bits(b), _mm512_srli_epi32(bits(a), 16), 0xea));
}
}  // namespace simd

// AMX with bf16: 8 tiles of 16 rows of 64 bytes. The words are written in assembler: the intrinsics of GCC 12 do not say
// that they read and write memory, so that stores before them may be moved or lost.
#include <array>
#include <utility>

#include <sys/syscall.h>
#include <unistd.h>

namespace simd {
static constexpr int MATRIX = 16, DEPTH = 2 * W;

// Linux enlarges a process's threads for the tiles once it asks (Documentation/arch/x86/xstate.rst).
SIMD_INLINE bool matrix_allowed() {
  static const bool allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
  return allowed;
}
SIMD_INLINE void matrix_begin() {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[8] = {64, 64, 64, 64, 64, 64, 64, 64}, no_tile[8] = {};
    uint8_t rows[8] = {16, 16, 16, 16, 16, 16, 16, 16}, no_rows[8] = {};
  } config;
  static_assert(sizeof config == 64, "LDTILECFG reads 64 bytes");
  asm volatile("ldtilecfg %0" ::"m"(config));
}
SIMD_INLINE void matrix_end() { asm volatile("tilerelease"); }

template <int T>
SIMD_INLINE void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T>
SIMD_INLINE void tile_load(const void* p, int64_t bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(bytes), "i"(T) : "memory");
}
template <int T>
SIMD_INLINE void tile_store(void* p, int64_t bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(bytes), "i"(T) : "memory");
}
template <int TO, int A, int B>
SIMD_INLINE void tile_dot() { asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(B), "i"(A), "i"(TO)); }

template <class F, int... I>
SIMD_INLINE void each(std::integer_sequence<int, I...>, F f) { (f(std::integral_constant<int, I>{}), ...); }
template <int N, class F>
SIMD_INLINE void each(F f) { each(std::make_integer_sequence<int, N>{}, f); }

struct Rows {
  const bf16* first;
  int64_t stride;
};

template <int M, int N, class F>
SIMD_INLINE void multiply(float* c, int64_t c_stride, const std::array<Rows, M>& rows, const V* pairs, int64_t panel, int steps, bool add, F meanwhile) {
  constexpr int SUMS = M * N, HELD = N == 1 ? 1 : M, TURNS = 8 - SUMS - HELD;  // tiles: c, the operand that is held, the other
  static_assert(TURNS > 0, "there are 8 tiles");
  std::array<Rows, M> a = rows;
  const auto at = [=](auto t) { return c + t / N * MATRIX * c_stride + t % N * MATRIX; };
  each<SUMS>([=](auto t) {
    if (add) tile_load<t>(at(t), c_stride * 4);
    else tile_zero<t>();
  });
  for (int step = 0; step < steps; ++step) {
    const V* b = pairs + step * (DEPTH / 2);
    if constexpr (N == 1) {
      tile_load<SUMS>(b, 64);
      each<M>([&](auto m) {
        constexpr int TILE = SUMS + 1 + m % TURNS;
        tile_load<TILE>(a[m].first, a[m].stride * 2);
        tile_dot<m, TILE, SUMS>();
      });
    } else {
      each<M>([&](auto m) { tile_load<SUMS + m>(a[m].first, a[m].stride * 2); });
      each<N>([&](auto n) {
        constexpr int TILE = SUMS + M + n % TURNS;
        tile_load<TILE>(b + n * panel, 64);
        each<M>([&](auto m) { tile_dot<m * N + n, SUMS + m, TILE>(); });
      });
    }
    for (Rows& row : a) row.first += DEPTH;
    meanwhile();
  }
  each<SUMS>([=](auto t) { tile_store<t>(at(t), c_stride * 4); });
}

SIMD_INLINE void restore(V& low, V& high) {
  const V a = _mm512_shuffle_f32x4(low, high, 0x44), b = _mm512_shuffle_f32x4(low, high, 0xee);
  low = _mm512_shuffle_f32x4(a, a, 0xd8);
  high = _mm512_shuffle_f32x4(b, b, 0xd8);
}
SIMD_INLINE V column(const float* p) {
  const __m512i rows = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
  return _mm512_i32gather_ps(rows, p, 4);
}
}  // namespace simd

namespace {
using namespace simd;

using T = bf16;        // q, out
using C = bf16;  // cache

constexpr int up(int n, int to) { return (n + to - 1) / to * to; }
constexpr int KV_HEADS = 3, GROUP = 3;
constexpr int D = 64, DV = 64, BLOCK = 16;
constexpr int TILE_KV = 512, TILE_Q = 64, SPLIT_KV = 1024;
constexpr int ROW_BLOCK = 2 * MATRIX, PREFETCH = 1, TILE_FEW = 128;
constexpr bool CAUSAL = true;

constexpr int DP = up(D, DEPTH), DVP = up(DV, DEPTH);  // rows of scratch are whole vectors, zero-filled
constexpr int TP = up(TILE_KV, DEPTH), TS = TP + W;  // a row of scores, apart from the next by an odd number of cache lines
// Up to this many query tokens one tile holds all rows of a sequence, and its tokens are split instead.
constexpr int SPLIT_Q = TILE_Q;
constexpr int ROWS = up(TILE_Q * GROUP, MATRIX);
constexpr int PART = DVP + 2;  // a merged part: unnormalised output, maximum, sum
// Tokens that are prefetched at a time: about 1 KiB.
constexpr int FETCH = std::max<int>(1, 1024 / 256);
constexpr float LOG2E = 1.44269504088896341f, LN2 = 0.69314718055994531f, NONE = -INFINITY;

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

// What one thread works in. Sizes are compile-time facts, so the workspace is one multiplication.
struct alignas(64) Scratch {
  bf16 q[ROWS][DP];
  float s[ROW_BLOCK][TS];        // scores
  bf16 p[ROW_BLOCK][TP + DEPTH];  // weights
  float o[ROWS][DVP];
  V q_pairs[DP / 2];                // of MATRIX rows the dims 2 i and 2 i + 1, side by side
  V k_pairs[TP / MATRIX][DP / 2];   // of MATRIX tokens
  V v_pairs[DVP / MATRIX][TP / 2 + 1];  // of MATRIX dims the tokens 2 i and 2 i + 1; dims in the order of `interleave`
  bf16 k_rows[TP][DP];              // tokens whose K cannot be multiplied in place
  float turned[TP][MATRIX];         // scores, a key a row
  float scale;                      // of scores, to base 2
  float m[ROWS], l[ROWS], alpha[ROWS];
  int64_t limit[ROWS];  // tokens that a row sees
  Tile tiles[PREFETCH + 1];
  const Tile* ahead;  // the tile being prefetched
  int fetched;        // its tokens that are under way
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
}

// Tokens from `i` on, up to the end of the tile, that lie in one block.
[[maybe_unused]] inline int run_of(const Tile& tile, int i) { return std::min(tile.count - i, BLOCK - int((tile.t + i) % BLOCK)); }

// Prefetches a few more tokens of the tile ahead. Called among the work on a tile: the misses of a burst of prefetches fill
// the queue that the work's own loads stand in. Inlined by force: to GCC a function that only
// prefetches does nothing, and its call may go.
inline __attribute__((always_inline)) void fetch([[maybe_unused]] Scratch& w, int tokens = FETCH) {
  if (PREFETCH == 0) return;
  for (const int end = std::min(w.fetched + tokens, w.ahead->count); w.fetched < end; ++w.fetched) {
    for (int byte = 0; byte < 128; byte += 64) __builtin_prefetch(reinterpret_cast<const char*>(w.ahead->k[w.fetched]) + byte, 0, 2);
    for (int byte = 0; byte < 128; byte += 64) __builtin_prefetch(reinterpret_cast<const char*>(w.ahead->v[w.fetched]) + byte, 0, 2);
  }
}

// Keys of the tile up to the last that a row sees.
inline int seen_of(const Scratch& w, int row, const Tile& tile) {
  return int(std::clamp<int64_t>(w.limit[row] - tile.t, 0, tile.count));
}


// DEPTH dims of a token's K from d on, as bf16.
inline V k_dims(const C* p, int d) {
  return D - d >= DEPTH ? pairs(p + d) : pairs_n(p + d, D - d);
}

// DEPTH dims of a token's V from d on, as bf16.
inline V v_dims(const C* p, int d) {
  return DV - d >= DEPTH ? pairs(p + d) : pairs_n(p + d, DV - d);
}

inline void pack_k(Scratch& w, const Tile& tile, [[maybe_unused]] const pg_attend_args& a) {
  for (int i = 0; i < tile.count; i += MATRIX) {
    for (int d = 0; d < DP; d += DEPTH) {
      V rows[MATRIX];
      for (int j = 0; j < MATRIX; ++j) rows[j] = i + j < tile.count ? k_dims(tile.k[i + j], d) : zero();
      transpose(rows);
      std::copy(rows, rows + MATRIX, &w.k_pairs[i / MATRIX][d / 2]);
    }
  }
}

// V of tokens that nobody sees becomes 0: what lies there may be NaN, and 0 * NaN is.
inline void pack_v(Scratch& w, const Tile& tile, [[maybe_unused]] const pg_attend_args& a) {
  const auto pack = [&](int i, auto dims) {
    for (int d = 0; d < DVP; d += DEPTH) interleave(dims(i, d), dims(i + 1, d), w.v_pairs[d / MATRIX][i / 2], w.v_pairs[d / MATRIX + 1][i / 2]);
  };
  for (int first = 0; first < tile.count; first += DEPTH) {
    const bool whole = first >= 0 && first + DEPTH <= tile.count;
    for (int i = first; i < first + DEPTH; i += 2) {
      if (i % 8 == 0) fetch(w);
      if (whole) pack(i, [&](int i, int d) { return v_dims(tile.v[i], d); });
      else pack(i, [&](int i, int d) { return i >= 0 && i < tile.count ? v_dims(tile.v[i], d) : zero(); });
    }
  }
}

// Pairs of up to MATRIX rows of q.
inline void pack_q(Scratch& w) {
  for (int d = 0; d < DP; d += DEPTH) {
    for (int j = 0; j < MATRIX; ++j) w.q_pairs[d / 2 + j] = pairs(&w.q[j][d]);
    transpose(&w.q_pairs[d / 2]);
  }
}

// MATRIX tokens of K from token i on: in place if they lie in one block, else as a copy.
inline Rows k_rows(Scratch& w, const Tile& tile, int i, const pg_attend_args& a) {
  if (int((tile.t + i) % BLOCK) + MATRIX <= BLOCK) return {tile.k[i], a.k_stride_token};
  for (int j = i; j < std::min(i + MATRIX, tile.count); ++j)
    for (int d = 0; d < DP; d += DEPTH) store((float*)&w.k_rows[j][d], k_dims(tile.k[j], d));
  (void)a;
  return {w.k_rows[i], DP};
}

// Scores of up to MATRIX rows against the first `keys` keys, K in place.
inline void score_few(Scratch& w, int rows, const Tile& tile, int keys, const pg_attend_args& a) {
  constexpr int M = TP >= 4 * MATRIX ? 4 : 2;
  for (int i = 0; i < keys; i += M * MATRIX) {
    std::array<Rows, M> k;
    for (int m = 0; m < M; ++m) k[m] = i + m * MATRIX < keys ? k_rows(w, tile, i + m * MATRIX, a) : k[0];
    multiply<M, 1>(w.turned[i], MATRIX, k, w.q_pairs, 0, DP / DEPTH, false, [&] { fetch(w); });
  }
  for (int i = 0; i < keys; i += MATRIX) {
    fetch(w);
    for (int row = 0; row < rows; ++row) store(&w.s[row][i], column(&w.turned[i][row]));
  }
}

// M times MATRIX rows of a matrix.
template <int M>
inline std::array<Rows, M> rows_of(const bf16* first, int64_t stride) {
  std::array<Rows, M> rows;
  for (int m = 0; m < M; ++m) rows[m] = {first + m * MATRIX * stride, stride};
  return rows;
}

// Scores of M * MATRIX rows from `row` on against the first `keys` keys, K packed.
template <int M>
inline void score(Scratch& w, int row, int keys) {
  constexpr int N = M == 1 && TP >= 4 * MATRIX ? 4 : 2;
  for (int i = 0; i < keys; i += N * MATRIX)
    multiply<M, N>(&w.s[0][i], TS, rows_of<M>(w.q[row], DP), w.k_pairs[i / MATRIX], DP / 2, DP / DEPTH, false, [] {});
}

// The online softmax of `rows` rows from `row` on: their scores become weights, 0 where a row does not see the key.
inline void softmax(Scratch& w, int row, int rows, const Tile& tile, int keys) {
  float highest[ROW_BLOCK] = {}, base[ROW_BLOCK], total[ROW_BLOCK] = {};
  const V scale = set1(w.scale);
  for (int r = 0; r < rows; ++r) {
    const int seen = seen_of(w, row + r, tile);
    V most = set1(NONE);
    for (int i = 0; i < seen; i += W) {
      const V v = mul(load(&w.s[r][i]), scale);
      most = max(most, seen - i < W ? keep(v, seen - i, NONE) : v);
    }
    highest[r] = top(most);
  }
  for (int r = 0; r < rows; r += W) {
    const V before = load(&w.m[row + r]), m = max(before, load(&highest[r]));
    const V least = max(m, set1(-0x1.fffffep127f));  // nothing seen so far: -inf - -inf would be NaN
    store(&w.alpha[row + r], exp2(add(before, mul(least, set1(-1.0f)))));
    store(&base[r], mul(least, set1(-1.0f)));
    store(&w.m[row + r], m);
  }
  for (int r = 0; r < rows; ++r) {
    const int seen = seen_of(w, row + r, tile);
    V sums[2] = {zero(), zero()};
    const auto weigh = [&](int i, V& sum) {
      if (i >= seen) return zero();
      V p = exp2(fma(load(&w.s[r][i]), scale, set1(base[r])));
      if (seen - i < W) p = keep(p, seen - i, 0.0f);
      sum = add(sum, p);
      return p;
    };
    for (int i = 0; i < keys; i += DEPTH) {
      if (r == 0) fetch(w);
      const V low = weigh(i, sums[0]), high = weigh(i + W, sums[1]);
      store_pairs(&w.p[r][i], low, high);
    }
    total[r] = sum(add(sums[0], sums[1]));
  }
  for (int r = 0; r < rows; r += W) {
    store(&w.l[row + r], fma(load(&w.l[row + r]), load(&w.alpha[row + r]), load(&total[r])));
  }
}

// o = o * alpha + weights . V for M * MATRIX rows, of which `rows` exist.
template <int M>
inline void accumulate(Scratch& w, int row, int rows, int keys) {
  for (int r = row; r < row + rows; ++r)
    for (int d = 0; d < DVP; d += W) store(&w.o[r][d], mul(load(&w.o[r][d]), set1(w.alpha[r])));
  const auto dims = [&](auto n, int d) {
    multiply<M, n>(&w.o[row][d], DVP, rows_of<M>(w.p[0], TP + DEPTH), w.v_pairs[d / MATRIX], TP / 2 + 1, up(keys, DEPTH) / DEPTH, true, [&] { fetch(w); });
  };
  constexpr int N = M == 1 ? 4 : 2;
  int d = 0;
  for (; d + N * MATRIX <= DVP; d += N * MATRIX) dims(std::integral_constant<int, N>{}, d);
  for (; d < DVP; d += 2 * MATRIX) dims(std::integral_constant<int, 2>{}, d);
}

// Brings the dims of the rows' output back into their order.
inline void restore(Scratch& w, int rows) {
  for (int row = 0; row < rows; ++row)
    for (int d = 0; d < DVP; d += DEPTH) {
      V low = load(&w.o[row][d]), high = load(&w.o[row][d + W]);
      simd::restore(low, high);
      store(&w.o[row][d], low);
      store(&w.o[row][d + W], high);
    }
}

// The online-softmax step of an item's rows over one tile.
inline void step(Scratch& w, [[maybe_unused]] int64_t head, int rows, const Tile& tile, const pg_attend_args& a) {
  const auto weigh = [&](int row, int count, int keys) {
    softmax(w, row, count, tile, keys);
  };
  if (rows <= MATRIX) {
    score_few(w, rows, tile, tile.count, a);
    weigh(0, rows, tile.count);
    pack_v(w, tile, a);
    accumulate<1>(w, 0, rows, tile.count);
    return;
  }
  pack_k(w, tile, a);
  pack_v(w, tile, a);
  for (int row = 0; row < rows; row += ROW_BLOCK) {
    const int count = std::min(ROW_BLOCK, rows - row);
    int keys = 0;
    for (int r = row; r < row + count; ++r) keys = std::max(keys, seen_of(w, r, tile));
    if (keys == 0) continue;
    if (count > MATRIX) score<2>(w, row, keys);
    else score<1>(w, row, keys);
    weigh(row, count, keys);
    if (count > MATRIX) accumulate<2>(w, row, count, keys);
    else accumulate<1>(w, row, count, keys);
  }
}

// --- one work item ----------------------------------------------------------------------------------------------------

inline const T* q_row(const pg_attend_args& a, int64_t token, int64_t head) {
  return static_cast<const T*>(a.q) + token * a.q_stride_token + head * a.q_stride_head;
}

inline void clear(Scratch& w, int row) {
  std::fill(w.o[row], w.o[row] + DVP, 0.0f);
  w.m[row] = NONE;
  w.l[row] = 0.0f;
}

// Loads rows of query tokens [first, first + tokens) of sequence s, KV head `head`, as the item's tokens from `at` on;
// row = token * GROUP + query head.
void begin(Scratch& w, const pg_attend_args& a, int64_t s, const Sequence& seq, int64_t head, int64_t first, int tokens, int at = 0) {
  w.scale = (a.scale * LOG2E);
  for (int i = 0; i < tokens; ++i) {
    const int64_t position = seq.context - seq.tokens + first + i;
    for (int g = 0; g < GROUP; ++g) {
      const int row = (at + i) * GROUP + g;
      const T* q = q_row(a, a.cu_seqlens_q[s] + first + i, head * GROUP + g);
      const auto dims = [&](int d) { return d < D ? load_dims(q + d, D - d) : zero(); };
      for (int d = 0; d < DP; d += DEPTH) store_pairs(&w.q[row][d], dims(d), dims(d + W));
      clear(w, row);
      w.limit[row] = std::clamp<int64_t>(position + 1, 0, seq.context);
    }
  }
}

// Attends `rows` rows to those tokens of `range`, in sequence s, that they see.
void run(Scratch& w, const pg_attend_args& a, int64_t s, int64_t head, int rows, Range range) {
  const int32_t* table = a.block_table + s * a.block_table_stride;
  range.to = std::min(range.to, *std::max_element(w.limit, w.limit + rows));
  const int64_t from = range.from;
  if (rows <= MATRIX) pack_q(w);
  const int length = rows <= MATRIX ? TILE_FEW : TILE_KV;
  const auto tile_at = [&](int64_t t) -> Tile& { return w.tiles[(t - from) / length % (PREFETCH + 1)]; };
  for (int64_t t = from; t < from + PREFETCH * length; t += length) locate(a, table, head, t, range, tile_at(t), length);
  for (int64_t t = from; t < range.to; t += length) {
    Tile& ahead = tile_at(t + PREFETCH * length);
    locate(a, table, head, t + PREFETCH * length, range, ahead, length);
    w.ahead = &ahead;
    w.fetched = 0;
    const Tile& tile = tile_at(t);
    step(w, head, rows, tile, a);
    fetch(w, TILE_KV);
  }
  restore(w, rows);
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
  run(w, a, 0, head, tokens * GROUP, {piece * SPLIT_KV, std::min((piece + 1) * SPLIT_KV, prefix_of(a))});
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
    run(w, a, s, head, rows, {std::max(from, seq.from), to});
    for (int row = 0; row < heads * rows; ++row) keep_part(w, row, ws.part(s, seq, head + row / rows, seq.shared + piece, row % rows));
    return;
  }
  run(w, a, s, head, rows, {0, seq.context});
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
  int64_t part_rows = 0, sharing = 0;
  for (int64_t s = 0; s < a.num_seqs; ++s) {
    const Sequence seq = sequence(a, s);
    part_rows += part_rows_of(seq);
    sharing += seq.shared ? seq.tokens : 0;
  }
  const Workspace ws(a, part_rows);
  if (a.workspace_bytes < uint64_t(ws.bytes)) return PG_E_WORKSPACE;
  if (!matrix_allowed()) return PG_E_MATRIX;
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
    matrix_begin();
    // From the end: the last query tiles of a prefill are its longest.
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = items - 1; i >= 0; --i) item(a, ws, w, i);
    if (part_rows) {
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < a.num_seqs * KV_HEADS; ++i) {
        if (sequence(a, i / KV_HEADS).parts > 1) merge(a, ws, i / KV_HEADS, i % KV_HEADS);
      }
    }
    matrix_end();
  }
  return PG_OK;
}

PG_EXPORT void* pagegen_attend_call(void* self, void* const* tensors, intptr_t count) {
  return python::call(self, tensors, count, pagegen_attend);
}
