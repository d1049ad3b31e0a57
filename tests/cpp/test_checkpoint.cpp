// ampfuse::checkpoint in C++. tests/python/checkpoint/test_checkpoint_cpp.py has Python read what
// C++ writes, and the reverse.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/wait.h>

#include <fstream>

#include "checkpoint_folder.h"
#include "torch_catch.h"
#include "training.h"

using namespace ampfuse;
namespace fs = std::filesystem;

namespace {

std::string content_of(const fs::path& file) {
  std::ifstream reading(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(reading), std::istreambuf_iterator<char>()};
}

void flip_bit(const fs::path& file, size_t bit) {
  std::string content = content_of(file);
  content[bit / 8] = static_cast<char>(content[bit / 8] ^ (1 << bit % 8));
  std::ofstream(file, std::ios::binary) << content;
}

}  // namespace

TEST_CASE("training goes on from a checkpoint bit for bit", "[checkpoint]") {
  const auto kind = GENERATE(as<std::string>(), "float32", "masters", "remainders");
  const bool accumulates = GENERATE(false, true);
  CAPTURE(kind, accumulates);
  const Folder folder;
  CheckpointedTraining first(0, kind);
  first.run(5);
  if (accumulates) first.backward();
  checkpoint::save(folder.path, 5, first.objects(),
                   checkpoint::SaveOptions().gradients(accumulates).values("five"));
  const auto losses = first.run(4);

  CheckpointedTraining second(1, kind);
  second.run(2);
  const auto loaded = checkpoint::load(folder.path, second.objects());
  CHECK(loaded.step == 5);
  CHECK(loaded.values.toStringRef() == "five");
  CHECK(second.run(4) == losses);
  CHECK(same_tensors(second.tensors(), first.tensors()));
  CHECK(second.scaler.get_scale() == first.scaler.get_scale());
  const auto history = first.scaler.history();
  const auto other = second.scaler.history();
  REQUIRE(other.size() == 8);
  for (size_t i = 0; i < history.size(); ++i) CHECK(other[i].norm == history[i].norm);
}

TEST_CASE("values of all kinds come back", "[checkpoint]") {
  const Folder folder;
  const at::Tensor number = torch::randn({3}, torch::kComplexFloat);
  c10::impl::GenericDict keys(c10::AnyType::get(), c10::AnyType::get());
  keys.insert(3, at::arange(4, at::kShort));
  keys.insert("$x", c10::ivalue::Tuple::create({1.5, -HUGE_VAL, at::IValue(), true}));
  c10::impl::GenericList list(c10::AnyType::get());
  list.push_back(keys);
  // Conjugate and negative views are saved as the numbers they stand for.
  const std::vector<at::Tensor> tensors = {at::full({}, 2.0, at::kBFloat16), at::empty({0, 3}),
                                           at::arange(6).reshape({2, 3}).t(), number.conj(),
                                           torch::imag(number.conj())};
  for (const at::Tensor& tensor : tensors) list.push_back(tensor);
  checkpoint::save(folder.path, 1, {}, checkpoint::SaveOptions().values(list));
  const auto loaded = checkpoint::load(folder.path, {}).values.toListRef().vec();
  const auto dict = loaded[0].toGenericDict();
  CHECK(at::equal(dict.at(3).toTensor(), at::arange(4, at::kShort)));
  const auto& tuple = dict.at("$x").toTupleRef().elements();
  CHECK(tuple[0].toDouble() == 1.5);
  CHECK(tuple[1].toDouble() == -HUGE_VAL);
  CHECK(tuple[2].isNone());
  CHECK(tuple[3].toBool());
  for (size_t i = 0; i < tensors.size(); ++i) {
    CHECK(same_tensors({loaded[i + 1].toTensor()}, {tensors[i].resolve_conj().resolve_neg()}));
  }
}

TEST_CASE("every flipped bit of a checkpoint is found", "[checkpoint]") {
  const Folder folder;
  CheckpointedTraining training(0, "masters");
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

TEST_CASE("hashes are the 128 bits of XXH3 for all classes of lengths", "[checkpoint]") {
  // xxhash.xxh3_128_hexdigest(bytes(7 * i % 256 for i in range(length))) in Python.
  const std::vector<std::pair<int64_t, const char*>> expected = {
      {0, "99aa06d3014798d86001c324468d497f"},    {1, "a6cd5e9392000f6ac44bdff4074eecdb"},
      {3, "656e81c56e41fe02c3489259e968ad9e"},    {4, "ab5c3e7474d809db81a65295de8e7dde"},
      {8, "e4b9dd0b66ff3c50ebabbd0695002ff6"},    {9, "82ddc95bc76007671c69c3f04aaed08c"},
      {16, "ddf6c1254d70f76794eaa17b20756f46"},   {17, "263f67af63088041735fe434ded90c3c"},
      {128, "dd9e5aa9bd51cc9cc6bd21ecc865f29f"},  {129, "00433635cf8d872e7f4accb76587485b"},
      {240, "89e3a0a2ee355d25d10beb4e0599e4b3"},  {241, "75f4da43f23cce5a541b19226f0052e8"},
      {1024, "8bbb9f7af37f2f52dc5acf0b043c445b"}, {1025, "20609de0583fad86e1d9cd946277ae26"},
      {2049, "3b50dc790efef5dac757a52bb931999d"},
  };
  c10::impl::GenericList tensors(c10::AnyType::get());
  for (const auto& [length, hash] : expected) {
    tensors.push_back(at::arange(length).mul(7).remainder(256).to(at::kByte));
  }
  const Folder folder;
  const auto options = checkpoint::SaveOptions().values(tensors);
  const std::string index =
      content_of(checkpoint::save(folder.path, 1, {}, options) / "checkpoint.json");
  for (const auto& [length, hash] : expected) {
    CAPTURE(length);
    CHECK_THAT(index, ContainsSubstring(hash));
  }
}

TEST_CASE("nothing is loaded from a damaged checkpoint, and the file is named", "[checkpoint]") {
  const Folder folder;
  CheckpointedTraining first(0, "float32");
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
  CheckpointedTraining second(1, "float32");
  std::vector<at::Tensor> before;
  for (const at::Tensor& tensor : second.tensors()) before.push_back(tensor.clone());
  const auto error = error_of([&] { checkpoint::load(folder.path, second.objects()); });
  CHECK_THAT(error, ContainsSubstring(file.string() + ": "));
  CHECK_THAT(error, ContainsSubstring(expected));
  CHECK(same_tensors(second.tensors(), before));
}

TEST_CASE("objects that do not match the checkpoint are refused", "[checkpoint]") {
  const Folder folder;
  torch::nn::Linear model(3, 2), wide(4, 2);
  AdamW optimizer(model->parameters());
  GradScaler scaler(GradScalerOptions().device(at::kCPU));
  checkpoint::save(folder.path, 1,
                   {{"model", model}, {"optimizer", optimizer}, {"scaler", scaler}});
  const auto check_refused = [&](const checkpoint::Objects& objects, const std::string& message) {
    CHECK_THAT(error_of([&] { checkpoint::load(folder.path, objects); }),
               ContainsSubstring(message));
  };
  check_refused({{"model", wide}},
                "weight is torch.float32 of shape [2, 3] in the checkpoint, and torch.float32 of "
                "shape [2, 4] in the model");
  check_refused({{"model", torch::nn::LayerNorm(torch::nn::LayerNormOptions({3}))}}, "weight is ");
  check_refused({{"other", model}}, "it has no other, only model, optimizer, scaler");
  Adam adam(model->parameters());
  check_refused({{"optimizer", adam}}, "the checkpoint has the state of AdamW, not of Adam");
  AdamW half({model->weight});
  check_refused({{"optimizer", half}},
                "its groups have [1] parameters, those in the checkpoint [2]");
  check_refused({{"model", optimizer}}, "LinearImpl, not of AdamW");
  check_refused({{"scaler", optimizer}}, "of GradScaler, not of AdamW");
  check_refused({{"optimizer", scaler}}, "of AdamW, not of GradScaler");
  check_refused({{"optimizer", model}}, "has the state of AdamW, not of a model");
  model->to(at::kHalf);
  check_refused({{"model", model}}, "torch.float16 of shape [2, 3] in the");
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

TEST_CASE("a loaded optimizer has the options of the saved one", "[checkpoint]") {
  const Folder folder;
  torch::nn::Linear model(3, 2);
  const auto options = AdamWOptions(0.5).betas({0.5, 0.75}).eps(0.25).weight_decay(0.125);
  AdamW saved(model->parameters(), AdamWOptions(options).amsgrad(true).maximize(true));
  saved.step();
  checkpoint::save(folder.path, 1, {{"optimizer", saved}});
  AdamW loaded(model->parameters());
  checkpoint::load(folder.path, {{"optimizer", loaded}});
  const auto& found = static_cast<AdamWOptions&>(loaded.param_groups()[0].options());
  CHECK(found.lr() == 0.5);
  CHECK(found.betas() == std::tuple(0.5, 0.75));
  CHECK(found.eps() == 0.25);
  CHECK(found.weight_decay() == 0.125);
  CHECK(found.amsgrad());
  CHECK(found.maximize());
}

TEST_CASE("a checkpoint that cannot be written is refused", "[checkpoint]") {
  const Folder folder;
  torch::nn::Linear model(3, 2);
  const auto save = [&](const fs::path& path, const checkpoint::Objects& objects,
                        const checkpoint::SaveOptions& options = {}) {
    return error_of([&] { checkpoint::save(path, 1, objects, options); });
  };
  for (const char* name : {"rng", "values"}) {
    CHECK_THAT(save(folder.path, {{name, model}}), ContainsSubstring("expected another name"));
  }
  CHECK_THAT(save(folder.path, {{"a", model}, {"a", model}}),
             ContainsSubstring("save: a: expected another name"));
  CHECK_THAT(save("/proc/run", {}),
             ContainsSubstring("/proc/run: the checkpoint of step 1 could not"));
  CHECK_THAT(save("", {}), ContainsSubstring("the checkpoint of step 1 could not be written"));
  const auto not_utf8 = checkpoint::SaveOptions().values(std::string("caf\xe9"));
  CHECK_THAT(save(folder.path, {}, not_utf8),
             ContainsSubstring("expected texts in UTF-8, got caf"));
  CHECK(folder.names().empty());
  const int other = ::open((folder.path / ".lock").c_str(), O_RDWR);  // as of another process
  REQUIRE(::flock(other, LOCK_EX) == 0);
  CHECK_THAT(save(folder.path, {}),
             ContainsSubstring("another process writes a checkpoint here now"));
  ::close(other);
  const fs::path path = checkpoint::save(folder.path, 1, {{"model", model}});
  CHECK_THAT(save(path, {}), ContainsSubstring("this is a checkpoint; pass the folder of the run"));
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
  checkpoint::save(folder.path, 1, {{"model", model}}, checkpoint::SaveOptions().keep(1));
  CHECK(checkpoint::latest(folder.path) == folder.path / "step-00000003.1");
  CHECK_FALSE(checkpoint::latest(folder.path / "nothing"));
  CHECK_THAT(error_of([&] { checkpoint::load(folder.path / "nothing", {}); }),
             ContainsSubstring("there is no complete checkpoint here"));
}

TEST_CASE("what cannot be read is an error", "[checkpoint]") {
  const Folder folder;
  const fs::path path = folder.path / std::string(5000, 'x');  // longer than a name may be
  CHECK_THAT(error_of([&] { checkpoint::load(path, {}); }), ContainsSubstring("cannot be read"));
  CHECK_THAT(error_of([&] { std::ignore = checkpoint::latest(path); }),
             ContainsSubstring("cannot be read"));
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
