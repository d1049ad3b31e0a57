#include <ampfuse/checkpoint.h>
#include <torch/nn/module.h>

namespace ampfuse::checkpoint {

Object::Object(std::shared_ptr<torch::nn::Module> model) : object_(model) {
  if (!model) {
    throw Error(
        "Object: expected a model that a ModuleHolder or a std::shared_ptr owns, got a null "
        "pointer, or a model on the stack or in its constructor");
  }
}

Object::Object(torch::nn::Module& model) : Object(model.weak_from_this().lock()) {}

}  // namespace ampfuse::checkpoint
