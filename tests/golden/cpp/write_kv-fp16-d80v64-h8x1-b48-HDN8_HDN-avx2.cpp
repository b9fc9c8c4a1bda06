// write_kv cpu:avx2 fp16-d80v64-h8x1-b48-HDN8_HDN
#include <algorithm>
#include <array>
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

namespace {
using C = uint16_t;  // moved, never read as a number
using T = C;
constexpr int KV_HEADS = 1, D = 80, DV = 64, BLOCK = 48;
constexpr int RUN = 16;  // tokens transposed at a time

// R rows of n items of SIZE bytes, joined by turns. Compilers make shuffles of it.
template <int R, int SIZE>
inline void join(char* __restrict to, const std::array<const char*, R>& rows, int n) {
  for (int i = 0; i < n; ++i)
    for (int r = 0; r < R; ++r) std::memcpy(to + (R * i + r) * SIZE, rows[r] + i * SIZE, SIZE);
}

// The rows of n tokens into the cache: N packs of PACK elements each, a pack's tokens side by side, `stride` from one pack to
// the next. Few rows, and packs that are large, are copied one by one.
template <int PACK, int N>
inline void put_rows(C* to, int64_t stride, const C* from, int64_t from_stride, int n) {
  constexpr int SIZE = PACK * sizeof(C), A = std::min(RUN, 4), B = RUN / A;
  if constexpr (SIZE == 1 || SIZE == 2 || SIZE == 4 || SIZE == 8) {
    if (4 * n > RUN) {  // every B-th of RUN rows is joined, then the B results
      alignas(64) char rooms[2][RUN * N * SIZE];
      for (int b = 0; b < B; ++b) {
        std::array<const char*, A> rows;
        for (int r = 0; r < A; ++r) rows[r] = (const char*)(from + std::min(b + r * B, n - 1) * from_stride);
        join<A, SIZE>(rooms[0] + b * A * N * SIZE, rows, N);
      }
      std::array<const char*, B> parts;
      for (int b = 0; b < B; ++b) parts[b] = rooms[0] + b * A * N * SIZE;
      if (n == RUN && stride == RUN * PACK) return join<B, SIZE>((char*)to, parts, A * N);
      join<B, SIZE>(rooms[1], parts, A * N);
      for (int d = 0; d < N; ++d) std::memcpy(to + d * stride, rooms[1] + d * RUN * SIZE, n * SIZE);
      return;
    }
  }
  for (int d = 0; d < N; ++d)
    for (int i = 0; i < n; ++i) std::memcpy(to + d * stride + i * PACK, from + i * from_stride + d * PACK, SIZE);
}

// --- tokens -----------------------------------------------------------------------------------------------------------

// K and V of n tokens from t on, whose slots lie side by side in a block.
inline void write(const pg_write_kv_args& a, int64_t t, int n) {
  const T* k = static_cast<const T*>(a.k);
  C* k_cache = static_cast<C*>(a.k_cache);
  const T* v = static_cast<const T*>(a.v);
  C* v_cache = static_cast<C*>(a.v_cache);
  const int64_t block = a.slot_mapping[t] / BLOCK, in_block = a.slot_mapping[t] % BLOCK;
  for (int64_t h = 0; h < KV_HEADS; ++h) {
    put_rows<8, 10>(
        k_cache + block * a.k_stride_block + in_block * a.k_stride_token + h * a.k_stride_head, a.k_stride_dim,
        k + t * a.src_k_stride_token + h * a.src_k_stride_head, a.src_k_stride_token, n);
  }
  for (int64_t h = 0; h < KV_HEADS; ++h) {
    put_rows<1, 64>(
        v_cache + block * a.v_stride_block + in_block * a.v_stride_token + h * a.v_stride_head, a.v_stride_dim,
        v + t * a.src_v_stride_token + h * a.src_v_stride_head, a.src_v_stride_token, n);
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
  // Below a few tokens a thread, waking the others costs more than the copy.
  const int threads = int(std::clamp<int64_t>(a.num_tokens / 16, 1, std::max(1, a.num_threads)));
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int part = 0; part < threads; ++part) {
    const int64_t last = a.num_tokens * (part + 1) / threads;
    for (int64_t t = a.num_tokens * part / threads; t < last;) {
      const int64_t slot = a.slot_mapping[t];
      int n = 1;  // tokens from t on whose slots lie side by side in a block
      while (slot >= 0 && n < RUN && t + n < last && slot % BLOCK + n < BLOCK && a.slot_mapping[t + n] == slot + n) ++n;
      if (slot >= 0) write(a, t, n);
      t += n;
    }
  }
  return PG_OK;
}

PG_EXPORT void* pagegen_write_kv_call(void* self, void* const* tensors, intptr_t count) {
  return python::call(self, tensors, count, pagegen_write_kv);
}
