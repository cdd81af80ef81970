/* Philox4x32-10 (Salmon et al. 2011): word i & 3 of counter i >> 2 with the seed as key, for element i. */
#define NB 512
#ifdef __AVX2__
/* The compiler's vectors: immintrin.h would take half of a kernel's compile time. */
typedef uint64_t Lanes __attribute__((vector_size(32)));
typedef int Halves __attribute__((vector_size(32)));
#ifdef __clang__
#define TIMES(a, b) ((a & 0xffffffffu) * (b))
#define MIXED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define TIMES(a, b) ((Lanes)__builtin_ia32_pmuludq256((Halves)(a), (Halves)(b)))
#define MIXED(a, b, ...) __builtin_shuffle(a, b, (Lanes){__VA_ARGS__})
#endif
typedef struct { Lanes a[10], b[10]; } Keys;
static inline void keys_of(int64_t seed, Keys *k) {
  uint32_t x = (uint32_t)seed, y = (uint32_t)((uint64_t)seed >> 32);
  for (int i = 0; i < 10; i++) {
    k->a[i] = (Lanes){x, x, x, x};
    k->b[i] = (Lanes){y, y, y, y};
    x += 0x9E3779B9u;
    y += 0xBB67AE85u;
  }
}
/* Words of elements first to first + n, n <= NB. Eight counters at a time, each word in a lane of 64 bits. */
static __attribute__((noinline)) void words(const Keys *k, I first, I n, uint32_t *w) {
  const Lanes M0 = {0xD2511F53u, 0xD2511F53u, 0xD2511F53u, 0xD2511F53u};
  const Lanes M1 = {0xCD9E8D57u, 0xCD9E8D57u, 0xCD9E8D57u, 0xCD9E8D57u};
  I g0 = first >> 2, groups = ((first + n + 3) >> 2) - g0;
  uint32_t all[NB + 40];
  for (I g = 0; g < groups; g += 8) {
    uint64_t at = (uint64_t)(g0 + g);
    Lanes a = (Lanes){0, 1, 2, 3} + at, b = a >> 32, c = {0}, d = c;
    Lanes a2 = (Lanes){4, 5, 6, 7} + at, b2 = a2 >> 32, c2 = c, d2 = c;
#pragma GCC unroll 10
    for (int i = 0; i < 10; i++) {
      Lanes p = TIMES(a, M0), q = TIMES(c, M1), p2 = TIMES(a2, M0), q2 = TIMES(c2, M1);
      a = (q >> 32) ^ b ^ k->a[i];
      c = (p >> 32) ^ d ^ k->b[i];
      b = q;
      d = p;
      a2 = (q2 >> 32) ^ b2 ^ k->a[i];
      c2 = (p2 >> 32) ^ d2 ^ k->b[i];
      b2 = q2;
      d2 = p2;
    }
#define OUT(a, b, c, d, at)                                                                                            \
  {                                                                                                                    \
    Lanes u = (a & 0xffffffffu) | (b << 32), v = (c & 0xffffffffu) | (d << 32);                                        \
    Lanes early = MIXED(u, v, 0, 4, 1, 5), late = MIXED(u, v, 2, 6, 3, 7);                                             \
    memcpy(all + (at), &early, 32);                                                                                    \
    memcpy(all + (at) + 8, &late, 32);                                                                                 \
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
