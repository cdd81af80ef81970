/* The head of every C kernel: 16-bit types, and the functions that device functions call.
   The C library's functions are declared here: including its headers takes a tenth of the time of a small kernel. */
typedef __INT8_TYPE__ int8_t;
typedef __INT16_TYPE__ int16_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __UINTPTR_TYPE__ uintptr_t;
extern void *malloc(__SIZE_TYPE__), *calloc(__SIZE_TYPE__, __SIZE_TYPE__);
extern void free(void *);
extern void *memcpy(void *, const void *, __SIZE_TYPE__), *memset(void *, int, __SIZE_TYPE__);
extern float logf(float), log2f(float), sinf(float), cosf(float);
extern double log(double);
#define NAN __builtin_nanf("")

#define INLINE static inline __attribute__((always_inline))
typedef int64_t I;

INLINE float bits(uint32_t i) { float f; memcpy(&f, &i, 4); return f; }
INLINE uint32_t raw(float f) { uint32_t i; memcpy(&i, &f, 4); return i; }

INLINE float ld_f32(const void *p, I i) { return ((const float *)p)[i]; }
INLINE void st_f32(void *p, I i, float v) { ((float *)p)[i] = v; }

INLINE float ld_bf16(const void *p, I i) { return bits((uint32_t)((const uint16_t *)p)[i] << 16); }
INLINE void st_bf16(void *p, I i, float v) { /* to nearest, ties to even */
  uint32_t u = raw(v), r = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
  ((uint16_t *)p)[i] = (uint16_t)(v != v ? 0x7fc0u : r);
}

/* float16 by integers: a multiplication by 2^112 corrects exponents and subnormals. */
INLINE float ld_f16(const void *p, I i) {
  uint32_t h = ((const uint16_t *)p)[i], e = (h & 0x7fffu) << 13;
  uint32_t finite = raw(bits(e) * 0x1p112f), other = e | 0x7f800000u;
  return bits((h & 0x7fffu) >= 0x7c00u ? other | (h & 0x8000u) << 16 : finite | (h & 0x8000u) << 16);
}
INLINE void st_f16(void *p, I i, float v) {
  uint32_t u = raw(v), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  uint32_t normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1)) >> 13;
  uint32_t small = raw(bits(a) + 0.5f) - 0x3f000000u; /* the sum rounds to the spacing of subnormals */
  uint32_t h = a < 0x38800000u ? small : a >= 0x477ff000u ? 0x7c00u : normal;
  ((uint16_t *)p)[i] = (uint16_t)(sign | (v != v ? 0x7e00u : h));
}

/* e^r for |r| < ln 2 / 2: the polynomial of least relative error, 3.1e-9. */
INLINE float near_exp_(float r) {
  float p = 1.3814539415761828e-3f;
  p = p * r + 8.36874544620514e-3f;
  p = p * r + 4.166838899254799e-2f;
  p = p * r + 1.666652113199234e-1f;
  p = p * r + 4.999999403953552e-1f;
  return p * (r * r) + r + 1.f;
}

/* e^x within 1 ulp: x = n ln 2 + r, in two steps of ln 2; 2^n in two factors, so that subnormal results are right. */
INLINE float exp_(float x) {
  float y = x < -105.f ? -105.f : x;
  y = y > 90.f ? 90.f : y;
  float m = y * 1.44269504088896341f + 12582912.f, k = m - 12582912.f;
  int32_t n = (int32_t)(raw(m) - 0x4B400000u), h = n >> 1;
  float r = y - k * 0.693145751953125f;
  r = r - k * 1.428606765330187e-6f;
  float p = near_exp_(r);
  return p * bits((uint32_t)(h + 127) << 23) * bits((uint32_t)(n - h + 127) << 23);
}

INLINE float exp2_(float x) {
  float y = x < -151.f ? -151.f : x;
  y = y > 129.f ? 129.f : y;
  float m = y + 12582912.f, k = m - 12582912.f, r = (y - k) * 0.69314718055994531f;
  int32_t n = (int32_t)(raw(m) - 0x4B400000u), h = n >> 1;
  float p = near_exp_(r);
  return p * bits((uint32_t)(h + 127) << 23) * bits((uint32_t)(n - h + 127) << 23);
}

INLINE float abs_(float x) { return bits(raw(x) & 0x7fffffffu); }

/* erf within 1 ulp: an odd polynomial near 0, else 1 - e^r of a polynomial r in [-18, -1.6],
   where 2^n needs one factor.
   Coefficients: N. Juffa, "Efficient implementation of the error function erff" (Stack Overflow, 2016). */
INLINE float erf_(float x) {
  float t = abs_(x), s = x * x;
  float near = -5.96761703e-4f;
  near = near * s + 4.99119423e-3f;
  near = near * s - 2.67681349e-2f;
  near = near * s + 1.12819925e-1f;
  near = near * s - 3.76125336e-1f;
  near = near * s + 1.28379166e-1f;
  near = near * x + x;
  t = t > 4.f ? 4.f : t; /* erf is 1 from 3.92 on */
  s = t * t;
  float r = -1.72853470e-5f * t + 3.83197126e-4f, u = -3.88396438e-3f * t + 2.42546219e-2f;
  r = r * s + u;
  r = r * t - 1.06777877e-1f;
  r = r * t - 6.34846687e-1f;
  r = r * t - 1.28717512e-1f;
  r = r * t - t;
  float m = r * 1.44269504088896341f + 12582912.f, k = m - 12582912.f;
  float f = r - k * 0.69314718055994531f;
  float p = near_exp_(f);
  r = 1.f - bits(raw(p) + (raw(m) << 23));
  r = bits(raw(r) | (raw(x) & 0x80000000u));
  return x != x ? x : t > 0.927734375f ? r : near;
}

/* Phi(-|x|) of the normal distribution is e (1/2 - v t P(t)) for e = e^(-x^2 / 2), v = a |x|, t = 1 / (1 + v); P is
   fitted for |x| < 6, to a relative error of 3.7e-9. */
INLINE float tail_(float x, float *e) {
  float v = abs_(x) * .275f;
  v = v > 4.f ? 4.f : v; /* e is 0 there or nearly so, and infinity times 0 would be NaN */
  float t = 1.f / (v + 1.f), p = 4.529619e-2f;
  p = p * t - 2.1607488e-1f;
  p = p * t + 3.12848e-1f;
  p = p * t - 1.1322318e-1f;
  p = p * t + 2.7319201e-1f;
  p = p * t + 2.5460497e-1f;
  p = p * t + 3.94327e-1f;
  p = p * t + 4.9972898e-1f;
  float w = -.5f * x * x;
  float m = w * 1.44269504088896341f + 12582912.f, k = m - 12582912.f;
  float y = near_exp_(w - k * 0.69314718055994531f);
  *e = w < -86.f ? 0.f : bits(raw(y) + (raw(m) << 23));
  return (.5f - v * t * p) * *e;
}

/* Phi(x) within 1e-7, and the derivative of x Phi(x) within 1.4e-7. */
INLINE float normal_(float x) {
  float e, q = tail_(x, &e);
  return x < 0.f ? q : 1.f - q;
}
INLINE float gelu_slope_(float x) {
  float e, q = tail_(x, &e);
  return (x < 0.f ? q : 1.f - q) + x * (e * 0.3989422804014327f);
}
