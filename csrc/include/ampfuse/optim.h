/// \file
/// All optimizers.
#pragma once

#include <ampfuse/adam.h>
#include <ampfuse/sgd.h>
