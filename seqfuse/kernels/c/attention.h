/* Attention: BACKWARD is 0 or 1, DROPS is whether weights are dropped, BENDS whether there is a soft-cap. LD and ST read
   and write the dtype of q. Each sum is computed by one thread, so results do not depend on the number of threads. */

typedef struct {
  I B, H, G, S, N, D; /* batch, heads of q, heads of q for each of k, queries, keys, elements of a head */
  I P, M; /* elements of a head in whole vectors; keys in whole tiles, plus a vector: rows use all cache sets */
  I q[3], k[3], v[3], y[3], dy[3], dq[3], dk[3], dv[3]; /* strides of batch, head, row */
  I mask[4], masked; /* masked: 1 for float32 that is added, 2 for bytes that are 0 where a key is hidden */
  I causal, window, threshold, direct; /* direct: rows are read in place */
  I rows, memory;                      /* queries at a time, and floats per thread */
} Shape;

#define AT(t, b, h, r) ((b) * n->t[0] + (h) * n->t[1] + (r) * n->t[2])
#define MASK(b, h, r) ((b) * n->mask[0] + (h) * n->mask[1] + (r) * n->mask[2])
#ifndef NB
#define NB 512 /* as in philox.h, which is only included for dropout */
#endif
#define ROWS 60 /* the most that `Shape.rows` may be */
#if DROPS
#define KEPT(keep, x) ((x) * ((keep) ? 1.f : 0.f)) /* multiplied, so that NaN and Inf become NaN */
#else
#define KEPT(keep, x) (x)
#endif

/* The range of keys that a row sees. */
INLINE void seen(const Shape *n, I row, I *lo, I *hi) {
  I first = 0, end = n->N;
  if (n->causal && row + 1 < end) end = row + 1;
  if (n->window && !n->causal && row + n->window < end) end = row + n->window;
  if (n->window && row - n->window + 1 > first) first = row - n->window + 1;
  *hi = end;
  *lo = first < end ? first : end;
}

#define APART static __attribute__((noinline)) /* compiled once: loops take most of the compile time */

APART void fill(float *x, I from, I to, float value) {
  for (I i = from; i < to; i++) x[i] = value;
}

/* copies rows as P floats, with zeros after the D elements of a head */
APART void rows_of(const Shape *n, const void *p, I at, I stride, I rows, float *to) {
  for (I r = 0; r < rows; r++) {
    for (I d = 0; d < n->D; d++) to[r * n->P + d] = LD(p, at + r * stride + d);
    for (I d = n->D; d < n->P; d++) to[r * n->P + d] = 0.f;
  }
}

/* writes the first D of P floats of each row, times a factor per row */
APART void store(const Shape *n, const float *from, const float *factor, void *p, I at, I stride, I rows) {
  for (I r = 0; r < rows; r++)
    for (I d = 0; d < n->D; d++) ST(p, at + r * stride + d, from[r * n->P + d] * (factor ? factor[r] : 1.f));
}

/* copies columns as `ld` floats, with zeros after the rows */
APART void columns_of(const Shape *n, const void *p, I at, I stride, I rows, float *to, I ld) {
  for (I r0 = 0; r0 < rows; r0 += 16)
    for (I d = 0; d < n->D; d++)
      for (I r = r0; r < r0 + 16 && r < rows; r++) to[d * ld + r] = LD(p, at + r * stride + d);
  for (I d = 0; d < n->D; d++)
    for (I r = rows; r < ld; r++) to[d * ld + r] = 0.f;
}

#if BENDS
INLINE float tanh_(float x) {
  float a = abs_(x), e = exp_(2.f * (a > 10.f ? 10.f : a)), far = (e - 1.f) / (e + 1.f), u = a * a;
  float near = -8.863235529902197e-3f;
  near = near * u + 2.1869488536155203e-2f;
  near = near * u - 5.396825396825397e-2f;
  near = near * u + 1.3333333333333333e-1f;
  near = near * u - 3.3333333333333333e-1f;
  near = near * u * a + a;
  float y = a < .25f ? near : far;
  return x != x ? x : bits(raw(y) | (raw(x) & 0x80000000u));
}
#endif

#define FLOOR(i) ((i) / LANES * LANES)
#define CEIL(i) (((i) + LANES - 1) / LANES * LANES)

/* s = scale s, then the soft-cap, plus the row of the mask that begins at `row`, for the keys that a row sees, and -inf
   up to whole vectors; `bent` is the derivative of the soft-cap. */
APART void scores(const Shape *n, float *s, const void *mask, I row, I from, I to, float scale, float cap, float *bent) {
  I a = FLOOR(from), b = CEIL(to);
#if BENDS
#pragma omp simd
  for (I i = a; i < b; i++) {
    float t = tanh_(s[i] * scale / cap);
    s[i] = cap * t;
    bent[i] = 1.f - t * t;
  }
#else
#pragma omp simd
  for (I i = a; i < b; i++) s[i] *= scale;
#endif
  I step = n->mask[3];
  if (n->masked == 1) {
    const float *added = (const float *)mask + row;
#pragma omp simd
    for (I i = from; i < to; i++) s[i] += added[i * step];
  } else if (n->masked) {
    const uint8_t *shown = (const uint8_t *)mask + row;
#pragma omp simd
    for (I i = from; i < to; i++) s[i] = shown[i * step] ? s[i] : -__builtin_inff();
  }
  fill(s, a, from, -__builtin_inff());
  fill(s, to, b, -__builtin_inff());
}

/* Scores to e^(score - greatest), zeros beyond the keys that the row sees; returns the sum. `greatest` is 0 for a row
   that sees no key. An infinite score makes only the weight of its own key NaN. */
APART float weights(float *x, I lo, I from, I to, I hi, float *greatest, int *blind, int *bad) {
  float most = -__builtin_inff();
  int nan = 0;
  double sum = 0;
  from = FLOOR(from);
  to = CEIL(to);
#pragma omp simd reduction(max : most) reduction(| : nan)
  for (I i = from; i < to; i++) {
    most = x[i] > most ? x[i] : most;
    nan |= x[i] != x[i];
  }
  *blind = most == -__builtin_inff() && !nan;
  *bad = nan;
  if (*blind) most = 0.f;
  if (nan) most = NAN;
  for (I i0 = from; i0 < to; i0 += NB) {
    I end = i0 + NB < to ? i0 + NB : to;
    float some = 0.f;
#pragma omp simd reduction(+ : some)
    for (I i = i0; i < end; i++) {
      float e = exp_(x[i] - most);
      x[i] = e;
      some += e;
    }
    sum += some;
  }
  fill(x, lo, from, 0.f);
  fill(x, to, hi, 0.f);
  *greatest = most;
  float total = (float)sum;
  return total == 0.f || most == __builtin_inff() ? 1.f : total;
}

/* The range of keys that any of these rows sees, from the start of a tile. */
INLINE void any_seen(const Shape *n, I r0, I rows, I *lo, I *hi) {
  I ignored;
  seen(n, r0, lo, &ignored);
  seen(n, r0 + rows - 1, &ignored, hi);
  *lo = (*lo < *hi ? *lo : *hi) / WIDTH * WIDTH;
}

#define STEP 128 /* terms per call, so that the right factor fits the L1 cache */

#if !BACKWARD
static void part(const Shape *n, I b, I h, I r0, const int64_t *seed, const void *q, const float *kt, const void *v,
                 const float *vp, const void *mask, void *y, float *lse, float scale, float cap, float keep, float *mem) {
  I R = n->S - r0 < n->rows ? n->S - r0 : n->rows, P = n->P, ld = n->M, lo, hi;
  any_seen(n, r0, R, &lo, &hi);
  float *s = mem, *out = s + n->rows * ld, *packed = out + n->rows * P, *bent = packed + n->rows * P, factor[ROWS];
  const float *left = (const float *)q + AT(q, b, h, r0);
  if (!n->direct) {
    rows_of(n, q, AT(q, b, h, r0), n->q[2], R, packed);
    left = packed;
  }
  mm(R, (hi - lo + WIDTH - 1) / WIDTH * WIDTH, n->D, left, n->direct ? n->q[2] : P, kt + lo, ld, s, ld, 0);
#if DROPS
  Keys keys;
  keys_of(*seed, &keys);
#endif
  for (I r = 0; r < R; r++) {
    I from, to, row = r0 + r;
    seen(n, row, &from, &to);
    float *x = s + r * ld - lo, most;
    int blind, bad;
    scores(n, x, mask, MASK(b, h, row), from, to, scale, cap, bent - lo);
    float total = weights(x, lo, from, to, hi, &most, &blind, &bad);
    lse[(b * n->H + h) * n->S + row] = most + logf(total);
    factor[r] = keep / total;
#if DROPS
    I first = ((b * n->H + h) * n->S + row) * n->N;
    for (I at = from; at < to; at += NB) {
      I m = to - at < NB ? to - at : NB;
      uint32_t w[NB], t = (uint32_t)n->threshold;
      words(&keys, first + at, m, w);
#pragma omp simd
      for (I i = 0; i < m; i++) x[at + i] = KEPT(w[i] >= t, x[at + i]);
    }
#endif
  }
  const float *right = n->direct ? (const float *)v + AT(v, b, h / n->G, 0) : vp;
  I ldv = n->direct ? n->v[2] : P;
  if (hi == lo) memset(out, 0, 4 * R * P);
  for (I k = lo; k < hi; k += STEP)
    mm(R, P, hi - k < STEP ? hi - k : STEP, s + k - lo, ld, right + k * ldv, ldv, out, P, k > lo);
  store(n, out, factor, y, AT(y, b, h, r0), n->y[2], R);
}

void k(const int64_t *seed, const void *q, const void *k, const void *v, const void *mask, void *y, float *lse,
       float *mem, const Shape *n, float scale, float cap, float keep, int threads) {
  I heads = n->H / n->G, kt = n->D * n->M, vp = n->direct ? 0 : n->N * n->P;
  float *own = mem + n->B * heads * (kt + vp);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (I i = 0; i < n->B * heads; i++) {
    columns_of(n, k, AT(k, i / heads, i % heads, 0), n->k[2], n->N, mem + i * (kt + vp), n->M);
    if (vp) rows_of(n, v, AT(v, i / heads, i % heads, 0), n->v[2], n->N, mem + i * (kt + vp) + kt);
  }
  I parts = (n->S + n->rows - 1) / n->rows, all = n->B * n->H * parts;
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
  for (int t = 0; t < threads; t++)
    for (I i = t; i < all; i += threads) {
      I b = i / parts / n->H, h = i / parts % n->H;
      const float *packed = mem + (b * heads + h / n->G) * (kt + vp);
      part(n, b, h, i % parts * n->rows, seed, q, packed, v, packed + kt, mask, y, lse, scale, cap, keep,
           own + t * n->memory);
    }
}

#else
/* The gradients of one key head, and of the query heads that share it. */
static void part(const Shape *n, I b, I shared, const int64_t *seed, const void *q, const void *k, const void *v,
                 const void *mask, const void *dy, void *dq, void *dk, void *dv, float *dmask, float scale, float cap,
                 float keep, float *mem) {
  I P = n->P, D = n->D, S = n->S, N = n->N, ld = n->M, spoiled = 0;
  float *kt = mem, *vt = kt + D * ld, *s = vt + D * ld, *g = s + n->rows * ld, *bent = g + n->rows * ld;
  float *dks = bent + ld, *dvs = dks + N * P, *ks = dvs + N * P, *qs = ks + N * P, *dys = qs + n->rows * P;
  float *dqs = dys + n->rows * P;
#if DROPS
  Keys keys;
  keys_of(*seed, &keys);
#endif
  const float *right = (const float *)k + AT(k, b, shared, 0);
  I ldk = n->direct ? n->k[2] : P;
  if (!n->direct) {
    rows_of(n, k, AT(k, b, shared, 0), n->k[2], N, ks);
    right = ks;
  }
  columns_of(n, k, AT(k, b, shared, 0), n->k[2], N, kt, ld);
  columns_of(n, v, AT(v, b, shared, 0), n->v[2], N, vt, ld);
  memset(dks, 0, 4 * N * P);
  memset(dvs, 0, 4 * N * P);
  for (I h = shared * n->G; h < (shared + 1) * n->G; h++)
    for (I r0 = 0; r0 < S; r0 += n->rows) {
      I R = S - r0 < n->rows ? S - r0 : n->rows, lo, hi;
      any_seen(n, r0, R, &lo, &hi);
      I wide = (hi - lo + WIDTH - 1) / WIDTH * WIDTH;
      const float *left = (const float *)q + AT(q, b, h, r0), *d = (const float *)dy + AT(dy, b, h, r0);
      I ldq = n->direct ? n->q[2] : P, ldd = n->direct ? n->dy[2] : P;
      if (!n->direct) {
        rows_of(n, q, AT(q, b, h, r0), n->q[2], R, qs);
        rows_of(n, dy, AT(dy, b, h, r0), n->dy[2], R, dys);
        left = qs;
        d = dys;
      }
      mm(R, wide, D, left, ldq, kt + lo, ld, s, ld, 0);
      mm(R, wide, D, d, ldd, vt + lo, ld, g, ld, 0);
      for (I r = 0; r < R; r++) {
        I from, to, row = r0 + r;
        seen(n, row, &from, &to);
        float *x = s + r * ld - lo, *e = g + r * ld - lo, most;
        int blind, bad;
        scores(n, x, mask, MASK(b, h, row), from, to, scale, cap, bent - lo);
        float total = weights(x, lo, from, to, hi, &most, &blind, &bad);
        double sum = 0;
        spoiled |= bad;
#if DROPS
        I word = ((b * n->H + h) * S + row) * N;
#endif
        I a = FLOOR(from), z = CEIL(to);
        fill(e, a, from, 0.f); /* hidden elements may be NaN */
        fill(e, to, z, 0.f);
        for (I at = a; at < z; at += NB) {
          I m = z - at < NB ? z - at : NB;
          float some = 0.f;
#if DROPS
          uint32_t w[NB], t = (uint32_t)n->threshold;
          words(&keys, word + at, m, w);
#endif
#pragma omp simd reduction(+ : some)
          for (I i = at; i < at + m; i++) {
            float p = x[i] / total, d = KEPT(w[i - at] >= t, keep * e[i]);
            some += p * d;
            e[i] = d;
#if DROPS /* weights are not negative: until the end of the row, the sign stores whether a weight is dropped */
            p = bits(raw(p) | (uint32_t)(w[i - at] < t) << 31);
#endif
            x[i] = p;
          }
          sum += some;
        }
        float along = (float)sum;
        if (dmask) {
          float *to_mask = dmask + ((b * n->H + h) * S + row) * N;
          fill(to_mask, 0, from, 0.f);
#pragma omp simd
          for (I i = from; i < to; i++) {
            float p = bits(raw(x[i]) & 0x7fffffffu), d = p * (e[i] - along);
            to_mask[i] = blind ? 0.f : d;
          }
          fill(to_mask, to, N, 0.f);
        }
#pragma omp simd
        for (I i = a; i < z; i++) {
          float p = bits(raw(x[i]) & 0x7fffffffu), d = p * (e[i] - along) * scale;
          e[i] = blind ? 0.f : d;
          x[i] = KEPT(!(raw(x[i]) >> 31), keep * p);
        }
#if BENDS
#pragma omp simd
        for (I i = a; i < z; i++) e[i] *= bent[i - lo];
#endif
        fill(e, lo, from, 0.f);
        fill(e, to, hi, 0.f);
        if (bad) fill(x, to, z, 0.f);
      }
      mtm(hi - lo, P, R, s, ld, d, ldd, dvs + lo * P, P);
      mtm(hi - lo, P, R, g, ld, left, ldq, dks + lo * P, P);
      if (hi == lo) memset(dqs, 0, 4 * R * P);
      for (I i = lo; i < hi; i += STEP)
        mm(R, P, hi - i < STEP ? hi - i : STEP, g + i - lo, ld, right + i * ldk, ldk, dqs, P, i > lo);
      store(n, dqs, 0, dq, AT(dq, b, h, r0), n->dq[2], R);
    }
  /* In a row with a NaN, the weights of all keys are NaN, including hidden keys. Torch's kernel, which has no limit but
     `causal`, leaves the weights of keys after the row at 0. */
  if (spoiled && (DROPS || BENDS || n->masked || n->window || !n->causal)) fill(dvs, 0, N * P, NAN);
  store(n, dks, 0, dk, AT(dk, b, shared, 0), n->dk[2], N);
  store(n, dvs, 0, dv, AT(dv, b, shared, 0), n->dv[2], N);
}

/* `dmask`: [B, H, S, N], the gradient of an added mask before it is summed over broadcast dimensions, or 0. */
void k(const int64_t *seed, const void *q, const void *k, const void *v, const void *mask, const void *dy, void *dq,
       void *dk, void *dv, float *dmask, float *mem, const Shape *n, float scale, float cap, float keep, int threads) {
  I heads = n->H / n->G;
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
  for (int t = 0; t < threads; t++)
    for (I i = t; i < n->B * heads; i += threads)
      part(n, i / heads, i % heads, seed, q, k, v, mask, dy, dq, dk, dv, dmask, scale, cap, keep, mem + t * n->memory);
}
#endif
