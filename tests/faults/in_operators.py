"""Faults in the operators: the arithmetic, the CPU kernels, and the CUDA kernels run on the CPU."""

from fault import Fault

FAULTS = [
    # --- arithmetic ---
    Fault(
        "A parameter with a remainder becomes NaN if other code sets it to zero or infinity.",
        "csrc/math/split_float.h",
        "return __builtin_bit_cast(float, is_nan_pattern(joined) && !is_nan ? upper : joined);",
        "return __builtin_bit_cast(float, joined);",
        "tests/python/ops tests/python/optim test_cpp test_fused_step",
    ),
    Fault(
        "The momentum of SGD does not start with the first gradient but with a part of it.",
        "csrc/math/fused_sgd.h",
        "return {static_cast<acc_t>(lr), count == 1};",
        "return {static_cast<acc_t>(lr), count == -1};",
        "tests/python/ops tests/python/optim test_cpp test_fused_step",
    ),
    Fault(
        "The largest moment of a group is cut off, since its unit is rounded to nearest.",
        "csrc/math/coded_moment.h",
        "+ 0xfffbu) & 0xffff0000u",
        "+ 0x8000u) & 0xffff0000u",
        "test_cpp test_fused_step",
    ),
    Fault(
        "A small second moment becomes 0 in 8 bits, so that its element takes a step of any size.",
        "csrc/math/coded_moment.h",
        "magnitude_bits(root) < 1u ? 0u : 1u",
        "magnitude_bits(root) < 1u ? 0u : 0u",
        "test_fused_step",
    ),
    Fault(
        "A shard that begins within a counter draws the random numbers of its neighbours.",
        "csrc/cpu/vec/random_words.h",
        "first_ = first % math::kElementsPerCounter;",
        "first_ = 0;",
        "test_cpp",
    ),
    Fault(
        "The norm of tiny elements is taken from squares that have underflowed in part.",
        "csrc/math/multi_tensor_norm.h",
        "return sum >= (sizeof(acc_t) == 4 ? 0x1p-100 : 0x1p-1000);",
        "return sum > 0;",
        "tests/python/ops test_cpp test_multi_tensor",
    ),
    Fault(
        "Overflows in a row are not counted if the scale is static.",
        "csrc/math/update_scale.h",
        "  state.consecutive_skips = overflow ? state.consecutive_skips + 1 : 0;\n"
        "  if (!policy.dynamic) return state;\n",
        "  if (!policy.dynamic) return state;\n"
        "  state.consecutive_skips = overflow ? state.consecutive_skips + 1 : 0;\n",
        "tests/python/ops tests/python/amp test_cpp test_update_scale",
    ),
    Fault(
        "A scale that makes gradients too large is lowered by one power of two too few.",
        "csrc/math/cross_entropy.h",
        "return std::ldexp(scale, -1 - std::ilogb(factor / limit));",
        "return std::ldexp(scale, -std::ilogb(factor / limit));",
        "tests/python/losses test_cpp test_cross_entropy",
    ),
    Fault(
        "With a softcap, logits that are -inf or far below the cap get NaN gradients.",
        "csrc/math/cross_entropy.h",
        "const V w = Lane<V>::exp(V(-2) * Lane<V>::abs(x / V(softcap)));",
        "const V w = Lane<V>::exp(V(-2) * (x / V(softcap)));",
        "tests/python/losses test_cpp test_cross_entropy",
    ),
    Fault(
        "Gradients with a NaN norm are not clipped and keep their values.",
        "csrc/math/multi_tensor_clip.h",
        "return factor > 1 ? 1 : factor;",
        "return factor < 1 ? factor : 1;",
        "tests/python/ops tests/python/optim test_cpp test_multi_tensor test_fused_step",
    ),
    # --- operators and classes for the CPU ---
    Fault(
        "A chunk of a large tensor in which the work of a thread begins is processed twice.",
        "csrc/cpu/chunks.cpp",
        "int64_t chunk = (begin - effort_[tensor] + kStride - 1) / kStride;",
        "int64_t chunk = (begin - effort_[tensor]) / kStride;",
        "tests/python/ops tests/python/optim",
    ),
    Fault(
        "In long rows with label smoothing, all blocks of classes get the weights of the first.",
        "csrc/cpu/cross_entropy_rows.h",
        "    if (masses.weight != nullptr) {\n"
        "      masses.weight = static_cast<const char*>(masses.weight) + first * number_bytes_;\n"
        "    }\n"
        "    if (has_probabilities_) {\n",
        "    if (has_probabilities_) {\n",
        "tests/python/losses test_cpp",
    ),
    Fault(
        "The maximum of amsgrad is not stored if moments are bfloat16.",
        "csrc/cpu/vec/fused_step_blocks.h",
        "for (int m = 0; m < kCount; ++m) store(",
        "for (int m = 0; m < std::min(kCount, 2); ++m) store(",
        "tests/python/ops tests/python/optim test_cpp",
    ),
    Fault(
        "Shards and tiles of probabilities get the class weights of the first classes.",
        "csrc/ops/linear_cross_entropy.cpp",
        "weights = weights->narrow_symint(0, shard->first_class, weight.sym_size(0));",
        "weights = weights->narrow_symint(0, 0, weight.sym_size(0));",
        "tests/python/losses test_cpp",
    ),
    Fault(
        "Backward does not notice that a gradient formed in place was overwritten.",
        "csrc/autograd/cross_entropy.cpp",
        "context->save_for_backward({input.detach(), baked_scale});",
        "context->save_for_backward({input.variable_data(), baked_scale});",
        "tests/python/losses test_cpp",
    ),
    Fault(
        "Of more than 8192 classes, only the last block counts in the gradient of hidden states.",
        "csrc/linear/linear_cross_entropy_layer.cpp",
        "if (first > 0 || !is_first) before = sum;",
        "if (!is_first) before = sum;",
        "tests/python/losses test_cpp",
    ),
    Fault(
        "A C++ scaler loads a scale that is infinite as a float.",
        "csrc/amp/grad_scaler_state_dict.cpp",
        "if (!(scale >= 0 && std::isfinite(static_cast<float>(scale)))) {",
        "if (!(scale >= 0 && std::isfinite(scale))) {",
        "tests/python/amp test_cpp",
    ),
    Fault(
        "With a C++ scaler, a group with its own limit is clipped by the norm of all groups.",
        "csrc/optim/clip.cpp",
        "!known_norms.empty() && !find_inf && members.size() == groups.size();",
        "!known_norms.empty() && !find_inf;",
        "tests/python/amp tests/python/optim test_cpp",
    ),
    Fault(
        "A write to a lazy clone changes the original, too.",
        "csrc/tensors/tensor_list.cpp",
        "const bool needs_own_memory = !tensor.is_non_overlapping_and_dense() || "
        "!is_aligned(tensor) ||\n"
        "                                  (is_written && is_lazy_clone(tensor));",
        "const bool needs_own_memory = !tensor.is_non_overlapping_and_dense() || "
        "!is_aligned(tensor);",
        "tests/python/ops tests/python/optim",
    ),
    # --- CUDA kernels ---
    Fault(
        "A chunk is read again before other lanes of the warp have stored its unscaled elements.",
        "csrc/cuda/multi_tensor_norm.cuh",
        "  __syncwarp();  // norm_exact reads what other lanes have stored\n",
        "",
        "test_multi_tensor",
    ),
    Fault(
        "A row of 64 logits per thread counts its target twice.",
        "csrc/cuda/cross_entropy_held.cuh",
        "  if (kSetsTarget) held.set(team, target, -HUGE_VALF);\n",
        "",
        "test_cross_entropy",
    ),
    Fault(
        "A write to the end of a chunk of parameters is not adopted by their masters.",
        "csrc/cuda/fused_step_chunk.cuh",
        "const int i = min(lane * kStride, size - 1);",
        "const int i = min(lane * kStride, (size - 1) / kStride * kStride);",
        "test_fused_step",
    ),
    Fault(
        "Lanes overwrite the logits of a held row before others have read the target's logit.",
        "csrc/cuda/cross_entropy.cuh",
        "if constexpr (!is_held(kWork) || Team::kSize <= kWarp) team.sync();",
        "if constexpr (!is_held(kWork) || Team::kSize < kWarp) team.sync();",
        "test_cross_entropy",
    ),
    Fault(
        "Probabilities at positions are read as if the classes of a row were adjacent.",
        "csrc/cuda/cross_entropy_table.cuh",
        "mass += terms.of_target * row_probabilities[c * probabilities_at.class_stride];",
        "mass += terms.of_target * row_probabilities[c];",
        "test_cross_entropy",
    ),
    Fault(
        "The metrics of ignored rows are NaN if the classes are divided into shards.",
        "csrc/cuda/cross_entropy_shards.cuh",
        "const bool is_absent = is_ignored || table.is_elsewhere(index);",
        "const bool is_absent = table.is_elsewhere(index);",
        "test_cross_entropy",
    ),
    Fault(
        "Memory after the end of a row is read if the row has two packs that are not aligned.",
        "csrc/cuda/vectorized.cuh",
        "return are_aligned() ? packs : packs > 2 ? packs - 1 : 0;",
        "return are_aligned() ? packs : packs > 1 ? packs - 1 : 0;",
        "test_cross_entropy",
    ),
]
