/* Philox4x32-10 (Salmon et al. 2011): word i & 3 of counter i >> 2 under the seed as key, for element i. */
#define NB 512
#ifdef __AVX2__
#include <immintrin.h>
typedef struct { __m256i a[10], b[10]; } Keys;
static inline void keys_of(int64_t seed, Keys *k) {
  uint32_t x = (uint32_t)seed, y = (uint32_t)((uint64_t)seed >> 32);
  for (int i = 0; i < 10; i++) {
    k->a[i] = _mm256_set1_epi64x(x);
    k->b[i] = _mm256_set1_epi64x(y);
    x += 0x9E3779B9u;
    y += 0xBB67AE85u;
  }
}
/* Words of elements first to first + n, n <= NB. Eight counters at a time, each word in a lane of 64 bits. */
static __attribute__((noinline)) void words(const Keys *k, I first, I n, uint32_t *w) {
  const __m256i M0 = _mm256_set1_epi64x(0xD2511F53u), M1 = _mm256_set1_epi64x(0xCD9E8D57u);
  const __m256i low = _mm256_set1_epi64x(0xffffffffu);
  I g0 = first >> 2, groups = ((first + n + 3) >> 2) - g0;
  uint32_t all[NB + 40];
  for (I g = 0; g < groups; g += 8) {
    __m256i a = _mm256_add_epi64(_mm256_set1_epi64x(g0 + g), _mm256_set_epi64x(3, 2, 1, 0));
    __m256i b = _mm256_srli_epi64(a, 32), c = _mm256_setzero_si256(), d = c;
    __m256i a2 = _mm256_add_epi64(_mm256_set1_epi64x(g0 + g), _mm256_set_epi64x(7, 6, 5, 4));
    __m256i b2 = _mm256_srli_epi64(a2, 32), c2 = c, d2 = c;
#pragma GCC unroll 10
    for (int i = 0; i < 10; i++) {
      __m256i p = _mm256_mul_epu32(a, M0), q = _mm256_mul_epu32(c, M1);
      __m256i p2 = _mm256_mul_epu32(a2, M0), q2 = _mm256_mul_epu32(c2, M1);
      a = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(q, 32), b), k->a[i]);
      c = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p, 32), d), k->b[i]);
      b = q;
      d = p;
      a2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(q2, 32), b2), k->a[i]);
      c2 = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p2, 32), d2), k->b[i]);
      b2 = q2;
      d2 = p2;
    }
#define OUT(a, b, c, d, at)                                                                                            \
  {                                                                                                                    \
    __m256i u = _mm256_or_si256(_mm256_and_si256(a, low), _mm256_slli_epi64(b, 32));                                   \
    __m256i v = _mm256_or_si256(_mm256_and_si256(c, low), _mm256_slli_epi64(d, 32));                                   \
    __m256i l = _mm256_unpacklo_epi64(u, v), h = _mm256_unpackhi_epi64(u, v);                                          \
    _mm256_storeu_si256((__m256i *)(all + (at)), _mm256_permute2x128_si256(l, h, 0x20));                               \
    _mm256_storeu_si256((__m256i *)(all + (at) + 8), _mm256_permute2x128_si256(l, h, 0x31));                           \
  }
    OUT(a, b, c, d, 4 * g)
    OUT(a2, b2, c2, d2, 4 * g + 16)
#undef OUT
  }
  memcpy(w, all + (first & 3), 4 * n);
}
#else
typedef struct { uint32_t a[10], b[10]; } Keys;
static inline void keys_of(int64_t seed, Keys *k) {
  uint32_t x = (uint32_t)seed, y = (uint32_t)((uint64_t)seed >> 32);
  for (int i = 0; i < 10; i++) {
    k->a[i] = x;
    k->b[i] = y;
    x += 0x9E3779B9u;
    y += 0xBB67AE85u;
  }
}
static __attribute__((noinline)) void words(const Keys *k, I first, I n, uint32_t *w) {
  I g0 = first >> 2, groups = ((first + n + 3) >> 2) - g0;
  uint32_t A[NB / 4 + 2], B[NB / 4 + 2], C[NB / 4 + 2], D[NB / 4 + 2], all[NB + 8];
#pragma omp simd
  for (I g = 0; g < groups; g++) {
    uint32_t a = (uint32_t)(g0 + g), b = (uint32_t)((uint64_t)(g0 + g) >> 32), c = 0, d = 0;
#pragma GCC unroll 10
    for (int i = 0; i < 10; i++) {
      uint64_t p = (uint64_t)a * 0xD2511F53u, q = (uint64_t)c * 0xCD9E8D57u;
      uint32_t first_word = (uint32_t)(q >> 32) ^ b ^ k->a[i], third = (uint32_t)(p >> 32) ^ d ^ k->b[i];
      b = (uint32_t)q;
      d = (uint32_t)p;
      a = first_word;
      c = third;
    }
    A[g] = a;
    B[g] = b;
    C[g] = c;
    D[g] = d;
  }
  for (I g = 0; g < groups; g++) {
    all[4 * g] = A[g];
    all[4 * g + 1] = B[g];
    all[4 * g + 2] = C[g];
    all[4 * g + 3] = D[g];
  }
  memcpy(w, all + (first & 3), 4 * n);
}
#endif
