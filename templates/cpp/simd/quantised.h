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
