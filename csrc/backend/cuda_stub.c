/* cuda_stub.c - stands in for the CUDA backend in a build without nvcc. */
#include "backend.h"

kvc_status kvc_cuda_open(kvc_backend **out, kvc_error *err) {
    *out = NULL;
    return kvc_fail(err, KVC_ERROR_DEVICE,
                    "device \"cuda\" is not available: kvcomm was built without CUDA");
}
