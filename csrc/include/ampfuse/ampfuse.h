#pragma once

#include <ampfuse/autocast.h>
#include <ampfuse/build_info.h>
#include <ampfuse/clip_grad.h>
#include <ampfuse/cross_entropy.h>
#include <ampfuse/cross_entropy_loss.h>
#include <ampfuse/fused_adam.h>
#include <ampfuse/grad_scaler.h>
#include <ampfuse/linear_cross_entropy.h>
#include <ampfuse/linear_cross_entropy_loss.h>
#include <ampfuse/multi_tensor_clip.h>
#include <ampfuse/multi_tensor_norm.h>
#include <ampfuse/multi_tensor_unscale.h>
#include <ampfuse/optim.h>
#include <ampfuse/update_scale.h>
#include <ampfuse/version.h>
