/* Statistics of a float32 row, in vectors of 8 with 4 running sums each; long rows in spans, which are merged. */
typedef float V __attribute__((vector_size(32), aligned(4), may_alias));
#define SPAN 4096
#define AT(z, c) (*(const V *)((z) + (c)))

INLINE float lanes(V v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }

/* Mean and sum of squared deviations of n numbers. The rounding error of the mean is removed: in a constant row it is
   all there is. If numbers are further from the mean than the mean is from 0, it is less than the rounding error of
   their differences. Numbers are divided before they are added, so sums of finite numbers do not overflow. */
INLINE void of_span(const float *z, I n, float *mean, double *squares) {
  float by = 1.f / (float)n;
  V a = {0}, b = {0}, e = {0}, f = {0}, d, g, h, i;
  I c = 0;
  for (; c + 32 <= n; c += 32) {
    a += AT(z, c) * by;
    b += AT(z, c + 8) * by;
    e += AT(z, c + 16) * by;
    f += AT(z, c + 24) * by;
  }
  for (; c + 8 <= n; c += 8) a += AT(z, c) * by;
  float m = lanes((a + b) + (e + f));
  for (; c < n; c++) m += z[c] * by;
  V ra = {0}, rb = {0}, sa = {0}, sb = {0}, sc = {0}, sd = {0};
  for (c = 0; c + 32 <= n; c += 32) {
    d = AT(z, c) - m;
    g = AT(z, c + 8) - m;
    h = AT(z, c + 16) - m;
    i = AT(z, c + 24) - m;
    ra += d + g;
    rb += h + i;
    sa += d * d;
    sb += g * g;
    sc += h * h;
    sd += i * i;
  }
  for (; c + 8 <= n; c += 8) {
    d = AT(z, c) - m;
    ra += d;
    sa += d * d;
  }
  float rest = lanes(ra + rb), sum = lanes((sa + sb) + (sc + sd));
  for (; c < n; c++) {
    float one = z[c] - m;
    rest += one;
    sum += one * one;
  }
  rest *= by;
  double left = (double)rest * rest * (double)n;
  *mean = (double)m * m * (double)n < sum ? m : m + rest;
  *squares = sum - left < 0 ? 0 : sum - left;
}

/* Chan, Golub and LeVeque 1979: no difference of large sums. */
INLINE void moments(const float *z, I n, float *mean, double *squares) {
  of_span(z, n < SPAN ? n : SPAN, mean, squares);
  if (n <= SPAN) return;
  double joined = *mean;
  for (I at = SPAN; at < n; at += SPAN) {
    I count = n - at < SPAN ? n - at : SPAN;
    float own;
    double its;
    of_span(z + at, count, &own, &its);
    double delta = own - joined, part = (double)count / (double)(at + count);
    *squares += its + delta * delta * (double)at * part;
    joined += delta * part;
  }
  *mean = (float)joined;
}

/* The order of the sum depends only on n, not on other results of a kernel. */
INLINE double dot(const float *p, const float *q, I n) {
  double sum = 0;
  for (I at = 0; at < n; at += SPAN) {
    const float *u = p + at, *v = q + at;
    I count = n - at < SPAN ? n - at : SPAN, c = 0;
    V a = {0}, b = {0}, e = {0}, f = {0};
    for (; c + 32 <= count; c += 32) {
      a += AT(u, c) * AT(v, c);
      b += AT(u, c + 8) * AT(v, c + 8);
      e += AT(u, c + 16) * AT(v, c + 16);
      f += AT(u, c + 24) * AT(v, c + 24);
    }
    for (; c + 8 <= count; c += 8) a += AT(u, c) * AT(v, c);
    float part = lanes((a + b) + (e + f));
    for (; c < count; c++) part += u[c] * v[c];
    sum += part;
  }
  return sum;
}

INLINE double plain_sum(const float *z, I n) {
  double sum = 0;
  for (I at = 0; at < n; at += SPAN) {
    const float *own = z + at;
    I count = n - at < SPAN ? n - at : SPAN, c = 0;
    V a = {0}, b = {0}, e = {0}, f = {0};
    for (; c + 32 <= count; c += 32) {
      a += AT(own, c);
      b += AT(own, c + 8);
      e += AT(own, c + 16);
      f += AT(own, c + 24);
    }
    for (; c + 8 <= count; c += 8) a += AT(own, c);
    float part = lanes((a + b) + (e + f));
    for (; c < count; c++) part += own[c];
    sum += part;
  }
  return sum;
}

INLINE float rstd_of(double squares, I n, float eps) { return (float)(1. / __builtin_sqrt(squares / (double)n + eps)); }
