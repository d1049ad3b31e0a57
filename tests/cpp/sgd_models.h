// Access to the state and the options of ampfuse::SGD, for its tests.
#pragma once

#include <ampfuse/ampfuse.h>

#include "optim_models.h"

using ampfuse::MasterWeights;
using ampfuse::SGD;
using ampfuse::SGDOptions;
using TorchSGD = torch::optim::SGD;
using TorchSGDOptions = torch::optim::SGDOptions;

inline ampfuse::SGDParamState& sgd_state_of(torch::optim::Optimizer& optimizer,
                                            const torch::Tensor& param) {
  return static_cast<ampfuse::SGDParamState&>(*optimizer.state().at(param.unsafeGetTensorImpl()));
}

inline SGDOptions& sgd_options_of(torch::optim::Optimizer& optimizer) {
  return static_cast<SGDOptions&>(optimizer.param_groups()[0].options());
}

// Takes a step that is skipped.
inline void skip(SGD& optimizer, const Tensors& params) {
  feed(params, 100);
  optimizer.found_inf = torch::ones({}, params[0].device());
  optimizer.step();
  optimizer.found_inf.reset();
}
