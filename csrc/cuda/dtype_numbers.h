// libampfuse_cuda is compiled with the headers of one release of torch, and called with those of
// others. So the numbers of the dtypes that cross must be the same in all.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

static_assert(static_cast<int>(c10::ScalarType::Byte) == 0);
static_assert(static_cast<int>(c10::ScalarType::Char) == 1);
static_assert(static_cast<int>(c10::ScalarType::Short) == 2);
static_assert(static_cast<int>(c10::ScalarType::Half) == 5);
static_assert(static_cast<int>(c10::ScalarType::Float) == 6);
static_assert(static_cast<int>(c10::ScalarType::Double) == 7);
static_assert(static_cast<int>(c10::ScalarType::ComplexFloat) == 9);
static_assert(static_cast<int>(c10::ScalarType::ComplexDouble) == 10);
static_assert(static_cast<int>(c10::ScalarType::Bool) == 11);
static_assert(static_cast<int>(c10::ScalarType::BFloat16) == 15);
