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
