// The launches of optimizers and multi-tensor ops, with all their kernels.
#define AMPFUSE_CUDA_VERSION "none"
#define AMPFUSE_CUDA_ARCHS "none"

#include "simt/simt.h"

#include "cuda/fused_adam.cu"
#include "cuda/fused_sgd.cu"
#include "cuda/multi_tensor_clip.cu"
#include "cuda/multi_tensor_norm.cu"
#include "cuda/multi_tensor_unscale.cu"
#include "cuda/runtime.cu"
#include "cuda/update_scale.cu"
