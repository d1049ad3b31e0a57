// The launches of cross-entropy, with all their kernels.
#include "simt/simt.h"

#include "cuda/cross_entropy.cu"
#include "cuda/cross_entropy_backward.cu"
#include "cuda/cross_entropy_shards.cu"
