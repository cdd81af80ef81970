/* A CUDA driver that launches nothing, and tells what it was asked to: what Triton's own launchers, in C, call. */

#include <stdint.h>
#include <string.h>

struct Config { unsigned grid[3], block[3], shared; };

static int wanted;
static uint64_t values[512];
static unsigned sizes[5];
static int count;

void expect(int parameters) { wanted = parameters; }
int launches(void) { return count; }
uint64_t *parameters(void) { return values; }
unsigned *shape(void) { return sizes; }

int cuLaunchKernelEx(const struct Config *config, void *function, void **given, void **extra) {
  memcpy(sizes, config->grid, sizeof config->grid);
  sizes[3] = config->block[0];
  sizes[4] = config->shared;
  for (int i = 0; i < wanted; i++) memcpy(values + i, given[i], 8);
  count++;
  return 0;
}

int cuPointerGetAttribute(uint64_t *found, int attribute, uint64_t pointer) {
  *found = pointer;
  return 0;
}

int cuCtxGetCurrent(void **context) {
  *context = &count;
  return 0;
}

int cuDriverGetVersion(int *version) {
  *version = 13000;
  return 0;
}

int cuGetErrorString(int code, const char **text) {
  *text = "no error";
  return 0;
}
