/* Small float32 GEMMs whose sums stay in registers: terms are added in order, then the sum to the existing value. */
#if defined(__AVX512F__)
#define LANES 16
#define VECTORS 4
#elif defined(__AVX__)
#define LANES 8
#define VECTORS 2
#else
#define LANES 4
#define VECTORS 2
#endif
#define WIDTH (LANES * VECTORS) /* columns of a tile */
#define TILE 6                  /* rows of a tile */
typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* Vectors are explicit: -O3 would improve nothing, and take a sixth longer. */
#pragma GCC push_options
#pragma GCC optimize("O2")

/* c[i][j] (+)= sum over k of a[i ai + k ak] b[k][j], for m rows and n vectors of columns. */
INLINE void tile(const int m, const int n, I K, const float *a, const I ai, const I ak, const float *b, I ldb, float *c,
                 I ldc, int add) {
  Vec s[TILE][VECTORS];
#pragma GCC unroll 6
  for (int i = 0; i < m; i++)
#pragma GCC unroll 4
    for (int j = 0; j < n; j++) s[i][j] = (Vec){0};
  for (I k = 0; k < K; k++) {
    Vec v[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < n; j++) v[j] = *(const Vec *)(b + k * ldb + j * LANES);
#pragma GCC unroll 6
    for (int i = 0; i < m; i++) {
      float x = a[i * ai + k * ak];
#pragma GCC unroll 4
      for (int j = 0; j < n; j++) s[i][j] += x * v[j];
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < m; i++)
#pragma GCC unroll 4
    for (int j = 0; j < n; j++) {
      Vec *to = (Vec *)(c + i * ldc + j * LANES);
      if (add) s[i][j] += *to;
      *to = s[i][j];
    }
}

INLINE void column(const int n, I M, I K, const float *a, const I ai, const I ak, const float *b, I ldb, float *c,
                   I ldc, int add) {
  I i = 0;
  for (; i + TILE <= M; i += TILE) tile(TILE, n, K, a + i * ai, ai, ak, b, ldb, c + i * ldc, ldc, add);
  for (; i < M; i++) tile(1, n, K, a + i * ai, ai, ak, b, ldb, c + i * ldc, ldc, add);
}

INLINE void product(I M, I N, I K, const float *a, const I ai, const I ak, const float *b, I ldb, float *c, I ldc,
                    int add) {
  I j = 0;
  for (; j + WIDTH <= N; j += WIDTH) column(VECTORS, M, K, a, ai, ak, b + j, ldb, c + j, ldc, add);
  for (; j < N; j += LANES) column(1, M, K, a, ai, ak, b + j, ldb, c + j, ldc, add);
}

/* c (+)= a b. a: [M, K], b: [K, N], c: [M, N] with these row strides; N is a multiple of LANES. */
static __attribute__((noinline)) void mm(I M, I N, I K, const float *a, I lda, const float *b, I ldb, float *c, I ldc,
                                         int add) {
  product(M, N, K, a, lda, 1, b, ldb, c, ldc, add);
}

/* c += a^T b. a: [K, M]. */
static __attribute__((noinline)) void mtm(I M, I N, I K, const float *a, I lda, const float *b, I ldb, float *c, I ldc) {
  product(M, N, K, a, 1, lda, b, ldb, c, ldc, 1);
}

#pragma GCC pop_options
