/* Softmax of rows of scores with dropout: BACKWARD is 0 or 1, and DROPS whether weights are dropped. */

/* A product with 0 or the scale, not a choice: what is dropped keeps its sign, and NaN and Inf become NaN. */
#if DROPS
#define KEPT(keep, x) ((x) * ((keep) ? scale : 0.f))
#else
#define KEPT(keep, x) (x)
#endif

void k(const int64_t *seed, float *restrict scores, float *restrict other, I all, I R, I K, I r0, I k0, I S, I N,
       I causal, I window, I threshold, float scale, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (I part = 0; part < all; part++) {
    I row = r0 + part % R, lo = 0, hi = K;
    if (causal && row - k0 + 1 < hi) hi = row - k0 + 1;
    if (window && !causal && row + window - k0 < hi) hi = row + window - k0;
    if (window && row - window + 1 - k0 > lo) lo = row - window + 1 - k0;
    if (hi < 0) hi = 0;
    if (lo > hi) lo = hi;
    float *s = scores + part * K, most = -__builtin_inff();
    double sum = 0;
    int bad = 0;
#pragma omp simd reduction(max : most) reduction(| : bad)
    for (I i = lo; i < hi; i++) {
      most = s[i] > most ? s[i] : most;
      bad |= s[i] != s[i];
    }
    int blind = most == -__builtin_inff() && !bad;
    if (blind) most = 0.f;
    if (bad) most = NAN;
#pragma omp simd reduction(+ : sum)
    for (I i = lo; i < hi; i++) {
      float e = exp_(s[i] - most);
      s[i] = e;
      sum += e;
    }
    float total = (float)sum;
    /* Of an infinite score no more is spoiled than the key that it is of. */
    if (total == 0.f || most == __builtin_inff()) total = 1.f;
#if DROPS
    Keys keys;
    keys_of(*seed, &keys);
    I first = (part / R * S + row) * N + k0;
#endif
#if BACKWARD
    float *d = other + part * K;
    sum = 0;
#else
    other[part] = most + logf(total);
#endif
    for (I at = lo; at < hi; at += NB) {
      I n = hi - at < NB ? hi - at : NB;
#if DROPS
      uint32_t w[NB], t = (uint32_t)threshold;
      words(&keys, first + at, n, w);
#endif
#if BACKWARD
#pragma omp simd reduction(+ : sum)
      for (I i = 0; i < n; i++) {
        float p = s[at + i] / total, g = KEPT(w[i] >= t, d[at + i]);
        sum += (double)p * g;
        d[at + i] = g;
#if DROPS /* the sign of a weight, which has none, says until the end of the row whether it was dropped */
        p = bits(raw(p) | (uint32_t)(w[i] < t) << 31);
#endif
        s[at + i] = p;
      }
#else
#pragma omp simd
      for (I i = 0; i < n; i++) s[at + i] = KEPT(w[i] >= t, s[at + i] / total);
#endif
    }
#if BACKWARD
    float along = (float)sum;
#pragma omp simd
    for (I i = lo; i < hi; i++) {
      float p = bits(raw(s[i]) & 0x7fffffffu), v = p * (d[i] - along);
      d[i] = blind ? 0.f : v;
      s[i] = KEPT(!(raw(s[i]) >> 31), p);
    }
    for (I i = 0; i < lo; i++) d[i] = 0.f;
    for (I i = hi; i < K; i++) d[i] = 0.f;
#endif
    float none = 0.f * total; /* a NaN spoils the whole row, as it does where what is hidden is -inf */
    for (I i = 0; i < lo; i++) s[i] = none;
    for (I i = hi; i < K; i++) s[i] = none;
  }
}
