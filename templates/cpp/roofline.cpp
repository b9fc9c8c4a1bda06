// What this machine can do at most: plain streaming reads, fused multiply-adds in registers, products of pairs of bf16 and of
// AMX tiles.
// pagegen/tuning/roofline.py times the calls. No Jinja here: vectors are as wide as the target's flags allow.
#include <chrono>
#include <cstdint>
#include <omp.h>
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define VECTOR 64
#elif defined(__AVX2__)
#define VECTOR 32
#else
#define VECTOR 16
#endif
#define API extern "C" __attribute__((visibility("default")))

namespace {
typedef uint64_t Words __attribute__((vector_size(VECTOR), may_alias, aligned(VECTOR)));
typedef float Floats __attribute__((vector_size(VECTOR)));
constexpr int STREAM = 8;  // vectors in flight, of reads and of sums
constexpr int CHAINS = 12;  // independent chains of FMAs: more than latency times ports on any core so far
constexpr int64_t STEP = STREAM * VECTOR;

// a * b + c, fused where the target's vectors can: kernels are built so that the compiler fuses nothing by itself.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// Reads `bytes` from p, with PRODUCTS multiply-adds of each vector, and prefetches as many bytes from `ahead` unless that is null:
// once into the second cache or into the first and AGAIN times again, as attend.cpp.jinja's Pace. The multiply-adds are of
// fp32: as many of the pairs of AVX512_BF16 take as long on a Zen 5, where their time does not depend on the bytes.
template <int PRODUCTS, int AGAIN = 0>
inline __attribute__((always_inline)) uint64_t read_all(const char* p, int64_t bytes, const char* ahead = nullptr) {
  constexpr int SEEN = PRODUCTS ? 2 : STREAM, SUMS = VECTOR == 32 ? 8 : CHAINS;  // AVX2 has 16 registers for them all
  Words seen[SEEN] = {};
  Floats chain[SUMS] = {}, factor = {};
  if constexpr (PRODUCTS > 0) {
    factor += 0.5f;
    for (Floats& sum : chain) asm("" : "+x"(sum));  // chains of the same sums would become one
  }
  int64_t at = 0;
  const auto take = [&](int i) __attribute__((always_inline)) {
    const Words words = *(const Words*)(p + at + i * VECTOR);
    seen[i % SEEN] |= words;
#pragma GCC unroll 32
    for (int k = i * PRODUCTS; k < (i + 1) * PRODUCTS; k++) {
      asm("" : "+x"(factor));  // nor are these the same product
      chain[k % SUMS] = multiply_add((Floats)words, factor, chain[k % SUMS]);
    }
  };
  for (; at + STEP <= bytes; at += STEP) {
    if constexpr (AGAIN > 0) {
      for (int n = 0; n <= AGAIN; n++) {
        const int64_t lag = AGAIN == 3 && n == 3 ? 2048 : n * 512;
        const char* from = ahead + (at < lag ? 0 : at - lag);
        for (int64_t line = 0; line < STEP; line += 64) __builtin_prefetch(from + line, 0, 3);
      }
    } else if (ahead) {
      for (int64_t line = 0; line < STEP; line += 64) __builtin_prefetch(ahead + at + line, 0, 2);
    }
#pragma GCC unroll 8
    for (int i = 0; i < STREAM; i++) take(i);
  }
  for (; at + VECTOR <= bytes; at += VECTOR) take(0);
  if constexpr (PRODUCTS > 0)
    for (Floats& sum : chain) asm volatile("" : "+x"(sum));
  uint64_t any = 0;
  for (const Words& words : seen)
    for (int lane = 0; lane < VECTOR / 8; lane++) any |= words[lane];
  return any;
}

using Read = uint64_t (*)(const void* const* pieces, int64_t count, int64_t bytes, int32_t threads);
template <int PRODUCTS, int AGAIN>
uint64_t read_pieces(const void* const* pieces, int64_t count, int64_t bytes, int32_t threads) {
  uint64_t any = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(| : any)
  for (int64_t i = 0; i < count; i++)
    any |= read_all<PRODUCTS, AGAIN>((const char*)pieces[i], bytes, (const char*)pieces[i + 1 < count ? i + 1 : i]);
  return any;
}

struct Reader {
  int32_t products;
  Read once, thrice_more, six_times_more;
};
template <int... PRODUCTS>
constexpr Reader READERS[] = {{PRODUCTS, read_pieces<PRODUCTS, 0>, read_pieces<PRODUCTS, 3>, read_pieces<PRODUCTS, 6>}...};

// That of the most products that are no more than asked for: a limit may be too high, not too low.
const Reader& reader(int32_t products) {
  const auto& readers = READERS<0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 14, 16, 24, 28, 32>;
  const Reader* found = readers;
  for (const Reader& each : readers)
    if (each.products <= products) found = &each;
  return *found;
}
}  // namespace

// Reads `bytes` from p (aligned to 64), each thread its own part, `repeats` times over. The answer keeps the loads alive.
API uint64_t pagegen_read(const void* p, int64_t bytes, int64_t repeats, int32_t threads) {
  uint64_t any = 0;
#pragma omp parallel num_threads(threads) reduction(| : any)
  {
    const int64_t part = bytes / omp_get_num_threads() / STEP * STEP;
    const char* mine = (const char*)p + part * omp_get_thread_num();
    for (int64_t i = 0; i < repeats; i++) {
      any |= read_all<0>(mine, part);
      asm volatile("" ::: "memory");
    }
  }
  return any;
}

// Reads `count` pieces of `bytes` each (aligned to 64) in their order, each thread its own part of them, the next prefetched and
// `again`, 0, 3 or 6 times. Of each vector there are pagegen_products(products) multiply-adds.
API uint64_t pagegen_read_pieces(const void* const* pieces, int64_t count, int64_t bytes, int32_t threads, int32_t products, int32_t again) {
  const Reader& with = reader(products);
  return (again >= 6 ? with.six_times_more : again >= 3 ? with.thrice_more : with.once)(pieces, count, bytes, threads);
}

// How many multiply-adds pagegen_read_pieces does of each vector where so many are asked for.
API int32_t pagegen_products(int32_t products) { return reader(products).products; }

// Nanoseconds that reading `bytes` from p (aligned to 64) takes on this thread, some time after each line has been prefetched `passes`
// times over, all lines before the next pass; -1: after they have been read. What is prefetched in vain still comes from memory.
API int64_t pagegen_read_prefetched(const void* p, int64_t bytes, int32_t passes) {
  using Clock = std::chrono::steady_clock;
  uint64_t any = passes < 0 ? read_all<0>((const char*)p, bytes) : 0;
  for (int32_t pass = 0; pass < passes; pass++) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char*)p + at, 0, 2);
    asm volatile("" ::: "memory");
  }
  const auto later = Clock::now() + std::chrono::microseconds(50);
  while (Clock::now() < later) continue;
  const auto begin = Clock::now();
  any |= read_all<0>((const char*)p, bytes);
  asm volatile("" ::"r"(any));
  return std::chrono::nanoseconds(Clock::now() - begin).count();
}

// Loads the pointer at p, then the one at where that leads to, ... `count` times, each load waiting for the one before; answers the last.
API const void* pagegen_follow(const void* p, int64_t count) {
  for (int64_t i = 0; i < count; i++) p = *(const void* const*)p;
  return p;
}

// FP32 operations of a call: 2 for each lane, chain, step and thread.
API int64_t pagegen_fma(int64_t steps, int32_t threads) {
  float kept = 0.0f;
#pragma omp parallel num_threads(threads) reduction(+ : kept)
  {
    Floats chain[CHAINS], factor, addend;
    for (int lane = 0; lane < VECTOR / 4; lane++) factor[lane] = 0.5f, addend[lane] = 1.0f;
    asm volatile("" : "+x"(factor), "+x"(addend));
    for (Floats& sum : chain) sum = addend;
    for (int64_t i = 0; i < steps; i++) {
#pragma GCC unroll 12
      for (int c = 0; c < CHAINS; c++) chain[c] = multiply_add(chain[c], factor, addend);
    }
    for (const Floats& sum : chain) kept += sum[0];
  }
  return kept > 0.0f ? steps * CHAINS * (VECTOR / 4) * 2 * threads : 0;
}

// BF16 operations of a call: 4 for each lane, chain, step and thread. 0: the target's vectors do not multiply pairs.
API int64_t pagegen_pairs(int64_t steps, int32_t threads) {
#if defined(__AVX512BF16__)
  float kept = 0.0f;
#pragma omp parallel num_threads(threads) reduction(+ : kept)
  {
    __m512 chain[CHAINS], factor = _mm512_setzero_ps();
    asm volatile("" : "+x"(factor));
    for (__m512& sum : chain) sum = _mm512_set1_ps(1.0f);
    for (int64_t i = 0; i < steps; i++) {
#pragma GCC unroll 12
      for (int c = 0; c < CHAINS; c++) chain[c] = _mm512_dpbf16_ps(chain[c], (__m512bh)factor, (__m512bh)factor);
    }
    for (const __m512& sum : chain) kept += sum[0];
  }
  return kept > 0.0f ? steps * CHAINS * 16 * 4 * threads : 0;
#else
  (void)steps, (void)threads;
  return 0;
#endif
}

// BF16 operations of a call: 2 * 16 * 16 * 32 for each of 4 products of tiles a step and thread. 0: there is no AMX here.
API int64_t pagegen_amx(int64_t steps, int32_t threads) {
#if defined(__x86_64__) && defined(__linux__)
  unsigned a, b, c, d;
  constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (AMX_BF16 | AMX_TILE)) != (AMX_BF16 | AMX_TILE)) return 0;
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // Linux gives the tiles to a process that asks
  if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA)) return 0;
#pragma omp parallel num_threads(threads)
  {
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("ldtilecfg %0" ::"m"(config));
    asm volatile(
        "tilezero %%tmm0\n tilezero %%tmm1\n tilezero %%tmm2\n tilezero %%tmm3\n"
        "tilezero %%tmm4\n tilezero %%tmm5\n tilezero %%tmm6\n tilezero %%tmm7" ::);
    for (int64_t i = 0; i < steps; i++)
      asm volatile(
          "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n tdpbf16ps %%tmm7, %%tmm4, %%tmm1\n"
          "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n tdpbf16ps %%tmm7, %%tmm5, %%tmm3" ::);
    asm volatile("tilerelease" ::);
  }
  return steps * 4 * 2 * 16 * 16 * 32 * threads;
#else
  return 0;
#endif
}
