// ampfuse::checkpoint in C++. tests/python/checkpoint/test_checkpoint_cpp.py has Python read what
// C++ writes, and the reverse.
#include <sys/wait.h>

#include "torch_catch.h"
#include "training.h"

using namespace ampfuse;
namespace fs = std::filesystem;
using checkpoint::Error;

namespace {

/// A new folder, which is removed at the end.
struct Folder {
  Folder() {
    std::string name = (fs::temp_directory_path() / "ampfuse-XXXXXX").string();
    path = ::mkdtemp(name.data());
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { fs::remove_all(path); }

  std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& entry : fs::directory_iterator(path)) {
      if (entry.path().filename() != ".lock") found.push_back(entry.path().filename().string());
    }
    std::sort(found.begin(), found.end());
    return found;
  }

  fs::path path;
};

bool same(const std::vector<at::Tensor>& one, const std::vector<at::Tensor>& other) {
  if (one.size() != other.size()) return false;
  for (size_t i = 0; i < one.size(); ++i) {
    if (one[i].scalar_type() != other[i].scalar_type() || !at::equal(one[i], other[i]))
      return false;
  }
  return true;
}

std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors) result.push_back(tensor.clone());
  return result;
}

template <typename Function>
std::string error_of(const Function& function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void flip_bit(const fs::path& file, size_t bit) {
  std::string content = checkpoint::detail::read_file(file);
  content[bit / 8] = static_cast<char>(content[bit / 8] ^ (1 << bit % 8));
  std::ofstream(file, std::ios::binary) << content;
}

}  // namespace

TEST_CASE("training goes on from a checkpoint bit for bit", "[checkpoint]") {
  const auto kind = GENERATE(as<std::string>(), "float32", "masters", "remainders");
  const bool accumulates = GENERATE(false, true);
  CAPTURE(kind, accumulates);
  const Folder folder;
  Training first(0, kind);
  first.run(5);
  if (accumulates) first.backward();
  checkpoint::save(folder.path, 5, first.objects(),
                   checkpoint::SaveOptions().gradients(accumulates).values("five"));
  const auto losses = first.run(4);

  Training second(1, kind);
  second.run(2);
  const auto loaded = checkpoint::load(folder.path, second.objects());
  CHECK(loaded.step == 5);
  CHECK(loaded.values.toStringRef() == "five");
  CHECK(second.run(4) == losses);
  CHECK(same(second.tensors(), first.tensors()));
  CHECK(second.scaler.get_scale() == first.scaler.get_scale());
  const auto history = first.scaler.history();
  const auto other = second.scaler.history();
  REQUIRE(other.size() == 8);
  for (size_t i = 0; i < history.size(); ++i) CHECK(other[i].norm == history[i].norm);
}

TEST_CASE("values of all kinds come back", "[checkpoint]") {
  const Folder folder;
  auto keys = checkpoint::detail::new_dict();
  keys.insert(3, at::arange(4, at::kShort));
  keys.insert("$x", c10::ivalue::Tuple::create({1.5, -HUGE_VAL, at::IValue(), true}));
  c10::impl::GenericList list(c10::AnyType::get());
  list.push_back(at::full({}, 2.0, at::kBFloat16));
  list.push_back(keys);
  list.push_back(at::empty({0, 3}));
  list.push_back(at::arange(6).reshape({2, 3}).t());
  checkpoint::save(folder.path, 1, {}, checkpoint::SaveOptions().values(list));
  const auto loaded = checkpoint::load(folder.path, {}).values.toListRef().vec();
  CHECK(loaded[0].toTensor().item<double>() == 2);
  CHECK(loaded[0].toTensor().scalar_type() == at::kBFloat16);
  const auto dict = loaded[1].toGenericDict();
  CHECK(at::equal(dict.at(3).toTensor(), at::arange(4, at::kShort)));
  const auto& tuple = dict.at("$x").toTupleRef().elements();
  CHECK(tuple[0].toDouble() == 1.5);
  CHECK(tuple[1].toDouble() == -HUGE_VAL);
  CHECK(tuple[2].isNone());
  CHECK(tuple[3].toBool());
  CHECK(loaded[2].toTensor().sizes() == at::IntArrayRef{0, 3});
  CHECK(at::equal(loaded[3].toTensor(), at::arange(6).reshape({2, 3}).t()));
}

TEST_CASE("every flipped bit of a checkpoint is found", "[checkpoint]") {
  const Folder folder;
  Training training(0, "masters");
  training.run(1);
  const fs::path path = checkpoint::save(folder.path, 1, training.objects());
  size_t found = 0;
  for (const char* name : {"checkpoint.json", "tensors-00000.safetensors"}) {
    const fs::path file = path / name;
    const auto bits = static_cast<int64_t>(fs::file_size(file)) * 8;
    for (int i = 0; i < 200; ++i) {
      const auto bit = static_cast<size_t>(at::randint(bits, {}).item<int64_t>());
      flip_bit(file, bit);
      const std::string error = error_of([&] { checkpoint::verify(folder.path); });
      found += error.find("changed since it was written") != std::string::npos;
      flip_bit(file, bit);
    }
  }
  CHECK(found == 400);
  CHECK(checkpoint::verify(folder.path) == path);
}

TEST_CASE("nothing is loaded from a damaged checkpoint, and the file is named", "[checkpoint]") {
  const Folder folder;
  Training first(0, "float32");
  first.run(1);
  const fs::path file =
      checkpoint::save(folder.path, 1, first.objects()) / "tensors-00000.safetensors";
  const auto damage = GENERATE(as<std::string>(), "bit", "truncated", "missing");
  std::string expected;
  if (damage == "bit") {
    flip_bit(file, fs::file_size(file) * 8 - 1);
    expected = "the tensor has changed since it was written";
  } else if (damage == "truncated") {
    fs::resize_file(file, fs::file_size(file) - 1);
    expected = " bytes, got ";
  } else {
    fs::remove(file);
    expected = "this file is missing";
  }
  Training second(1, "float32");
  const auto before = copies(second.tensors());
  const auto error = error_of([&] { checkpoint::load(folder.path, second.objects()); });
  CHECK_THAT(error, ContainsSubstring(file.string() + ": "));
  CHECK_THAT(error, ContainsSubstring(expected));
  CHECK(same(second.tensors(), before));
}

TEST_CASE("a checkpoint of another model or optimizer is refused", "[checkpoint]") {
  const Folder folder;
  torch::nn::Linear model(3, 2), wide(4, 2);
  Adam adam(model->parameters());
  AdamW adamw(model->parameters());
  checkpoint::save(folder.path, 1, {{"model", model}, {"optimizer", adam}});
  const auto load = [&](const checkpoint::Objects& objects) {
    return error_of([&] { checkpoint::load(folder.path, objects); });
  };
  CHECK_THAT(load({{"model", wide}}),
             ContainsSubstring("weight is torch.float32 of shape [2, 3] in the checkpoint, and "
                               "torch.float32 of shape [2, 4] in the model"));
  CHECK_THAT(load({{"model", torch::nn::LayerNorm(torch::nn::LayerNormOptions({3}))}}),
             ContainsSubstring("weight is "));
  CHECK_THAT(load({{"optimizer", adamw}}),
             ContainsSubstring("the checkpoint has the state of Adam, not of AdamW"));
  CHECK_THAT(load({{"other", model}}), ContainsSubstring("it has no other"));
  Adam half({model->weight});
  CHECK_THAT(load({{"optimizer", half}}),
             ContainsSubstring("its groups have 1 parameters, those in the checkpoint 2"));
  model->to(at::kHalf);
  CHECK_THAT(load({{"model", model}}), ContainsSubstring("torch.float16 of shape [2, 3] in the"));
}

TEST_CASE("objects under each other's names are refused", "[checkpoint]") {
  const Folder folder;
  torch::nn::Linear model(3, 2);
  AdamW optimizer(model->parameters());
  GradScaler scaler(GradScalerOptions().device(at::kCPU));
  checkpoint::save(folder.path, 1,
                   {{"model", model}, {"optimizer", optimizer}, {"scaler", scaler}});
  const auto error = [&](const checkpoint::Objects& objects) {
    return error_of([&] { checkpoint::load(folder.path, objects); });
  };
  CHECK_THAT(error({{"model", optimizer}}), ContainsSubstring("LinearImpl, not of AdamW"));
  CHECK_THAT(error({{"scaler", optimizer}}), ContainsSubstring("of GradScaler, not of AdamW"));
  CHECK_THAT(error({{"optimizer", scaler}}), ContainsSubstring("of AdamW, not of GradScaler"));
  CHECK_THAT(error({{"optimizer", model}}), ContainsSubstring("which the model lacks"));
}

TEST_CASE("the state of a disabled scaler is refused before anything is loaded", "[checkpoint]") {
  const Folder folder;
  torch::nn::Linear model(3, 2);
  AdamW optimizer(model->parameters(), AdamWOptions(0.5));
  GradScaler disabled(GradScalerOptions().enabled(false));
  checkpoint::save(folder.path, 1, {{"optimizer", optimizer}, {"scaler", disabled}});
  AdamW other(model->parameters(), AdamWOptions(0.1));
  GradScaler scaler(GradScalerOptions().device(at::kCPU));
  CHECK_THAT(
      error_of([&] { checkpoint::load(folder.path, {{"optimizer", other}, {"scaler", scaler}}); }),
      ContainsSubstring("the state of a disabled scaler"));
  CHECK(other.param_groups()[0].options().get_lr() == 0.1);
  checkpoint::load(folder.path, {{"scaler", disabled}});
}

TEST_CASE("names that are taken, and the folder of a checkpoint, are refused", "[checkpoint]") {
  const Folder folder;
  torch::nn::Linear model(3, 2);
  const auto save = [&](const fs::path& path, const checkpoint::Objects& objects) {
    return error_of([&] { checkpoint::save(path, 1, objects); });
  };
  for (const char* name : {"rng", "values"}) {
    CHECK_THAT(save(folder.path, {{name, model}}), ContainsSubstring("expected another name"));
  }
  CHECK_THAT(save(folder.path, {{"a", model}, {"a", model}}),
             ContainsSubstring("save: a: expected another name"));
  const fs::path path = checkpoint::save(folder.path, 1, {{"model", model}});
  CHECK_THAT(save(path, {{"model", model}}),
             ContainsSubstring("this is a checkpoint; pass the folder of the run"));
}

TEST_CASE("old checkpoints are removed, and unfinished ones", "[checkpoint]") {
  const Folder folder;
  torch::nn::Linear model(3, 2);
  fs::create_directories(folder.path / ".unfinished-step-00000009-1");
  const auto options = checkpoint::SaveOptions().keep(2);
  for (int64_t step : {1, 2, 3}) checkpoint::save(folder.path, step, {{"model", model}}, options);
  CHECK(folder.names() == std::vector<std::string>{"step-00000002", "step-00000003"});
  checkpoint::save(folder.path, 3, {{"model", model}}, options);
  CHECK(folder.names() == std::vector<std::string>{"step-00000002", "step-00000003.1"});
  CHECK(checkpoint::latest(folder.path) == folder.path / "step-00000003.1");
  CHECK_FALSE(checkpoint::latest(folder.path / "nothing"));
  CHECK_THAT(error_of([&] { checkpoint::load(folder.path / "nothing", {}); }),
             ContainsSubstring("there is no complete checkpoint here"));
}

TEST_CASE("a second writer is refused, and a folder that cannot be written", "[checkpoint]") {
  const Folder folder;
  torch::nn::Linear model(3, 2);
  const auto save = [&](const fs::path& path) {
    return error_of([&] { checkpoint::save(path, 1, {{"model", model}}); });
  };
  {
    const checkpoint::detail::Writing other(folder.path, 1);
    CHECK_THAT(save(folder.path),
               ContainsSubstring("another process writes a checkpoint here now"));
  }
  CHECK(save(folder.path).empty());
  CHECK_THAT(save("/proc/run"), ContainsSubstring("/proc/run: the checkpoint of step 1 could not"));
}

TEST_CASE("a newer format is refused", "[checkpoint]") {
  const Folder folder;
  checkpoint::detail::Json index = {{"step", 1}, {"format", 2}, {"parts", nullptr}};
  index["files"] = checkpoint::detail::Json::object();
  fs::create_directories(folder.path / "step-00000001");
  checkpoint::detail::write_index(folder.path / "step-00000001", index);
  CHECK_THAT(error_of([&] { checkpoint::verify(folder.path); }),
             ContainsSubstring("written in format 2 by ampfuse "));
}

TEST_CASE("a save that is killed leaves the last checkpoint", "[checkpoint]") {
  const Folder folder;
  torch::nn::Linear model(300, 300);
  checkpoint::save(folder.path, 1, {{"model", model}});
  for (int kill = 0; kill < 30; ++kill) {
    const pid_t child = ::fork();
    if (child == 0) {
      for (int64_t step = 2;; ++step) {
        checkpoint::save(folder.path, step, {{"model", model}}, checkpoint::SaveOptions().keep(2));
      }
    }
    ::usleep(static_cast<useconds_t>(at::randint(20000, {}).item<int64_t>()));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    checkpoint::verify(folder.path);
  }
  CHECK(checkpoint::load(folder.path, {{"model", model}}).step >= 1);
  checkpoint::save(folder.path, 1 << 20, {{"model", model}}, checkpoint::SaveOptions().keep(1));
  CHECK(folder.names() == std::vector<std::string>{"step-01048576"});
}

TEST_CASE("conjugate and negative views are saved as the numbers they stand for", "[checkpoint]") {
  const Folder run;
  const at::Tensor value = torch::randn({3}, torch::kComplexFloat);
  at::Dict<std::string, at::Tensor> values;
  values.insert("conjugate", value.conj());
  values.insert("negative", torch::imag(value.conj()));
  checkpoint::save(run.path, 1, {}, checkpoint::SaveOptions().values(values));
  const auto loaded = checkpoint::load(run.path, {}).values.toGenericDict();
  CHECK(at::equal(loaded.at("conjugate").toTensor(), value.conj().resolve_conj()));
  CHECK(at::equal(loaded.at("negative").toTensor(), -torch::imag(value)));
}

TEST_CASE("texts that are not UTF-8 and paths that cannot be read are errors", "[checkpoint]") {
  const Folder run;
  const auto options = checkpoint::SaveOptions().values(std::string("caf\xe9"));
  CHECK(error_of([&] {
          checkpoint::save(run.path, 1, {}, options);
        }).find("could not be written") != std::string::npos);
  CHECK(run.names().empty());
  const std::string name(5000, 'x');  // longer than a name may be
  CHECK(error_of([&] { checkpoint::load(run.path / name, {}); }).find("cannot be read") !=
        std::string::npos);
  CHECK(error_of([&] { checkpoint::latest(run.path / name); }).find("cannot be read") !=
        std::string::npos);
}

TEST_CASE("numbers that do not fit into int64 are refused", "[checkpoint]") {
  using checkpoint::detail::Json;
  const auto decode = [](const Json& json) {
    return checkpoint::detail::decoded(
        json, [](const std::string&, const auto&...) { return at::Tensor(); });
  };
  CHECK(decode(Json::parse("9223372036854775807")).toInt() == INT64_MAX);
  CHECK(error_of([&] { decode(Json::parse("9223372036854775808")); }).find("9223372036854775808") !=
        std::string::npos);
}
