/// \file
/// The C++ API of ampfuse, for mixed-precision training with LibTorch. This header includes all
/// others.
///
///     ampfuse::AdamW optimizer(model->parameters(), ampfuse::AdamWOptions(1e-3));
///     ampfuse::GradScaler scaler;
///     ampfuse::CrossEntropyLoss criterion(ampfuse::CrossEntropyOptions(), &scaler);
///     for (const auto& [inputs, targets] : batches) {
///       optimizer.zero_grad();
///       torch::Tensor logits;
///       {
///         ampfuse::AutocastGuard autocast(torch::kCUDA, torch::kHalf);
///         logits = model->forward(inputs);
///       }
///       scaler.scale(criterion(logits, targets)).backward();
///       scaler.step(optimizer);
///       scaler.update();
///     }
///
/// - AutocastGuard makes the operators in a scope compute in 16 bits.
/// - GradScaler scales losses, and skips steps that overflow.
/// - Gate steps a learning rate scheduler only if the step was not skipped.
/// - Adam, AdamW and SGD are optimizers with master weights, unscaling and clipping.
/// - cross_entropy() and CrossEntropyLoss compute losses, and their gradients in the same pass.
/// - linear_cross_entropy() and LinearCrossEntropyLoss compute an output layer and its loss without
///   holding all logits in memory.
/// - accumulate() adds up the gradients of micro-batches.
/// - clip_grad_norm_() and get_total_norm() clip and measure gradients of other optimizers.
/// - checkpoint::save() and checkpoint::load() write and read the files of Python's checkpoints.
/// - multi_tensor_norm(), multi_tensor_unscale(), multi_tensor_clip(), fused_adam(), fused_sgd()
///   and update_scale() are the operators that the classes are made of.
/// - build_info() and AMPFUSE_VERSION describe the library.
///
/// Errors are c10::Error, or classes derived from it: c10::ValueError, c10::TypeError,
/// c10::IndexError and c10::NotImplementedError. Print what_without_backtrace(), since what() has a
/// backtrace. ScaleCollapseError and checkpoint::Error are std::runtime_error. Where a training
/// step makes the host wait for a GPU, the comment of the function says so.
///
/// Threads may call the functions at the same time, unless one writes a tensor that the other uses.
/// The comment of a class says what threads may do with its objects.
#pragma once

#include <ampfuse/accumulate.h>
#include <ampfuse/adam.h>
#include <ampfuse/autocast.h>
#include <ampfuse/build_info.h>
#include <ampfuse/checkpoint.h>
#include <ampfuse/clip_grad.h>
#include <ampfuse/cross_entropy.h>
#include <ampfuse/cross_entropy_loss.h>
#include <ampfuse/fused_adam.h>
#include <ampfuse/fused_optimizer.h>
#include <ampfuse/fused_sgd.h>
#include <ampfuse/gate.h>
#include <ampfuse/grad_scaler.h>
#include <ampfuse/linear_cross_entropy.h>
#include <ampfuse/linear_cross_entropy_loss.h>
#include <ampfuse/multi_tensor_clip.h>
#include <ampfuse/multi_tensor_norm.h>
#include <ampfuse/multi_tensor_unscale.h>
#include <ampfuse/optim.h>
#include <ampfuse/sgd.h>
#include <ampfuse/update_scale.h>
#include <ampfuse/version.h>
#include <ampfuse/weak_scaler.h>
