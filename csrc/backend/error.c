/* error.c - the two helpers that every layer uses: writing an error, and a checked product.
 *
 * Whoever detects a fault calls kvc_fail with its message; everybody above passes the status on
 * and leaves the message alone.
 */
#include "backend.h"

#include <stdarg.h>
#include <stdio.h>

kvc_status kvc_fail(kvc_error *err, kvc_status code, const char *format, ...) {
    if (err) {
        va_list args;
        va_start(args, format);
        vsnprintf(err->message, sizeof err->message, format, args);
        va_end(args);
        err->code = code;
    }
    return code;
}

bool kvc_mul(size_t *out, size_t a, size_t b) {
    if (b && a > SIZE_MAX / b) return false;
    *out = a * b;
    return true;
}

size_t kvc_dtype_bytes(kvc_dtype dtype) {
    static const size_t bytes[KVC_MATRIX_DTYPE_COUNT] = {4, 2, 2, 34, 18, 20};
    return bytes[dtype];
}

size_t kvc_row_bytes(kvc_dtype dtype, size_t n) {
    return (dtype < KVC_DTYPE_COUNT ? n : n / KVC_BLOCK) * kvc_dtype_bytes(dtype);
}

const char *kvc_dtype_name(kvc_dtype dtype) {
    static const char *const names[KVC_MATRIX_DTYPE_COUNT] = {"f32",  "f16",  "bf16",
                                                              "q8_0", "q4_0", "q4_1"};
    return (unsigned)dtype < KVC_MATRIX_DTYPE_COUNT ? names[dtype] : "?";
}
