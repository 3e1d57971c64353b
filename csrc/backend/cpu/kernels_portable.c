/* kernels_portable.c - the kernels for any processor; four lanes fit SSE2 and NEON alike. */
#define KERNELS_NAME "portable"
#define KERNELS_TABLE cpu_kernels_portable
#define KERNELS_LANES 4
#define KERNELS_ROWS 2
#define KERNELS_SUPPORTED 1
#include "kernels_body.h"
