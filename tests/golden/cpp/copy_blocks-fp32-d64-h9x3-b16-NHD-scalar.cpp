// copy_blocks cpu:scalar fp32-d64-h9x3-b16-NHD
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

namespace {
// One tensor's part of a block as dense runs: `outer` x `inner` runs of `length` items, with the strides between them.
template <int64_t ITEM>
struct Runs {
  int64_t outer, inner, length, outer_stride, inner_stride, block_stride;

  int64_t bytes() const { return outer * inner * length * ITEM; }

  // Calls f(where a run begins in the block, where it begins if all lie side by side, its bytes).
  template <class F>
  void each(F f) const {
    if (inner_stride == length && outer_stride == inner * length) {
      f(int64_t(0), int64_t(0), bytes());
      return;
    }
    for (int64_t i = 0; i < outer; ++i) {
      for (int64_t j = 0; j < inner; ++j) {
        f((i * outer_stride + j * inner_stride) * ITEM, (i * inner + j) * length * ITEM, length * ITEM);
      }
    }
  }

  void copy(void* cache, int64_t from, int64_t to) const {
    const char* source = static_cast<const char*>(cache) + from * block_stride * ITEM;
    char* target = static_cast<char*>(cache) + to * block_stride * ITEM;
    each([&](int64_t at, int64_t, int64_t size) { std::memcpy(target + at, source + at, size_t(size)); });
  }
};
}  // namespace

PG_EXPORT int32_t pagegen_abi_version(void) { return PAGEGEN_ABI_VERSION; }

PG_EXPORT int32_t pagegen_copy_blocks(const pg_copy_blocks_args* args) {
  const pg_copy_blocks_args& a = *args;
  if (a.size < sizeof(pg_copy_blocks_args)) return PG_E_SIZE;
  for (int64_t i = 0; i < 2 * a.num_pairs; ++i) {
    if (a.pairs[i] < 0 || a.pairs[i] >= a.num_blocks) return PG_E_SLOT;
  }
  const Runs<4> k_cache = {16, 3, 64, a.k_stride_token, a.k_stride_head, a.k_stride_block};
  const Runs<4> v_cache = {16, 3, 64, a.v_stride_token, a.v_stride_head, a.v_stride_block};
  const int threads = int(std::clamp<int64_t>(a.num_pairs / 4, 1, std::max(1, a.num_threads)));
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < a.num_pairs; ++i) {
    k_cache.copy(a.k_cache, a.pairs[2 * i], a.pairs[2 * i + 1]);
    v_cache.copy(a.v_cache, a.pairs[2 * i], a.pairs[2 * i + 1]);
  }
  return PG_OK;
}
